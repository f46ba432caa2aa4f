"""Where the error of FP8 MLA comes from: every path and every rounding against float64.

    python bench/numerics.py            measures on a GPU, writes bench/results/numerics/<gpu>.json
    python bench/numerics.py --table    writes that file's numbers into bench/numerics.md

A path is a kernel, run through the public wrapper, or one rounding put into an otherwise exact
float64 computation. Errors are relative to the exact output: ||out - exact|| / ||exact||.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from mla_bench import machine

BENCH = Path(__file__).resolve().parent
NOTE = BENCH / "numerics.md"
BEGIN, END = "<!-- begin of what --table writes -->", "<!-- end of what --table writes -->"
HEADS, BATCH, CKV, WIDTH = 16, 4, 512, 576
KV_LENS = (64, 1024, 8192, 32768)
LOGITS = ("std 1", "std 10", "up to 1e4")
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OURS, CAST = "this build", "cast + FA2"


@dataclass
class Problem:
    """BATCH requests of one query and `kv_len` tokens each."""

    q: torch.Tensor  # [BATCH, HEADS, 576] BF16
    pool: torch.Tensor  # [tokens, 576] FP8
    indices: torch.Tensor  # int32 [BATCH, kv_len]: the tokens of each request
    sm_scale: float

    def keys(self, request: int) -> torch.Tensor:
        """[kv_len, 576] float64; the first 512 columns are the values."""
        rows = self.pool.view(torch.uint8)[self.indices[request].long()]
        return rows.view(self.pool.dtype).double()

    def scores(self, request: int, q: torch.Tensor | None = None) -> torch.Tensor:
        """Exact logits [HEADS, kv_len] of a request, of other queries if they are given."""
        q = self.q if q is None else q
        return q[request].double() @ self.keys(request).T * self.sm_scale


def make_problem(kv_len: int, device, fill: Callable, kv: str = "e4m3", seed: int = 0) -> Problem:
    """A problem whose pool holds `fill(shape, generator)`; logits get a deviation of 1."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens = BATCH * kv_len
    pool = fill((tokens + 1, WIDTH), generator).to(FORMATS[kv])  # the last token is not referenced
    q = torch.randn(BATCH, HEADS, WIDTH, device=device, generator=generator).bfloat16()
    indices = torch.randperm(tokens, device=device, generator=generator).int()
    problem = Problem(q, pool, indices.view(BATCH, kv_len), 1.0)
    problem.sm_scale = 1.0 / float(problem.scores(0).std())
    return problem


def normal(shape, generator) -> torch.Tensor:
    """Values as a KV cache has them."""
    return torch.randn(shape, device=generator.device, generator=generator)


def set_logits(problem: Problem, logits: str) -> None:
    """Scale a problem whose logits have a deviation of 1 to one of LOGITS."""
    if logits == "up to 1e4":
        largest = max(float(problem.scores(b).abs().max()) for b in range(BATCH))
        problem.sm_scale *= 1e4 / largest
    else:
        problem.sm_scale *= float(logits.removeprefix("std "))


def attend(problem: Problem, round_p=lambda p: p, q: torch.Tensor | None = None) -> torch.Tensor:
    """[BATCH, HEADS, 512] float64; P, at most 1 in each row, goes through `round_p`.

    The sum of a row is that of P before it is rounded, as in our kernel.
    """
    out = []
    for request in range(BATCH):
        scores = problem.scores(request, q)
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        values = problem.keys(request)[:, :CKV]
        out.append(round_p(p) @ values / p.sum(-1, keepdim=True))
    return torch.stack(out)


def rounded(dtype: torch.dtype, scale: float = 1.0) -> Callable:
    """Rounding of `scale` times a tensor to a type."""
    return lambda x: (x * scale).to(dtype).double() / scale


ROUNDINGS = {
    "output in BF16": lambda problem, exact: rounded(torch.bfloat16)(exact),
    "P in FP16": lambda problem, _: attend(problem, rounded(torch.float16)),
    "P in BF16": lambda problem, _: attend(problem, rounded(torch.bfloat16)),
    "query in e4m3": lambda problem, _: attend(problem, q=rounded(FORMATS["e4m3"])(problem.q)),
    "P in e4m3, up to 1": lambda problem, _: attend(problem, rounded(FORMATS["e4m3"])),
    "P in e4m3, up to 448": lambda problem, _: attend(problem, rounded(FORMATS["e4m3"], 448.0)),
}


def run_kernel(problem: Problem, cast: bool) -> torch.Tensor:
    """Output [BATCH, HEADS, 512] BF16 of our kernel, or of FA2 on the pool cast to BF16."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    device, kv_len = problem.q.device, problem.indices.shape[1]
    pool = problem.pool.bfloat16() if cast else problem.pool
    begins = torch.arange(BATCH + 1, dtype=torch.int32, device=device)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the flat form works on every base
        wrapper.plan(
            begins,
            begins * kv_len,
            problem.indices.flatten(),
            torch.full((BATCH,), kv_len, dtype=torch.int32, device=device),
            *(HEADS, CKV, WIDTH - CKV, 1, False),
            *(problem.sm_scale, problem.q.dtype, pool.dtype),
        )
        paged = pool[:, None]
        return wrapper.run(
            problem.q[..., :CKV], problem.q[..., CKV:], paged[..., :CKV], paged[..., CKV:]
        )


KERNELS = {
    OURS: lambda problem, _: run_kernel(problem, cast=False),
    CAST: lambda problem, _: run_kernel(problem, cast=True),
}


def errors(out: torch.Tensor, exact: torch.Tensor) -> dict:
    """Relative error over everything and of the worst row."""
    diff = out.double() - exact
    rows = diff.norm(dim=-1) / exact.norm(dim=-1)
    return {"relative": float(diff.norm() / exact.norm()), "worst_row": float(rows.max())}


def measure(problem: Problem, paths: dict[str, Callable]) -> dict[str, dict]:
    """Path -> errors."""
    exact = attend(problem)
    return {name: errors(path(problem, exact), exact) for name, path in paths.items()}


# ---- unusual bytes


def largest(shape, generator) -> torch.Tensor:
    """+-448, the largest e4m3."""
    return 448.0 * torch.sign(normal(shape, generator))


def subnormal(shape, generator) -> torch.Tensor:
    """The subnormal e4m3 numbers +-1..7 x 2^-9."""
    codes = torch.randint(1, 8, shape, device=generator.device, generator=generator)
    return codes * 2.0**-9 * torch.sign(normal(shape, generator))


def poke(problem: Problem, slot: int, byte: int) -> None:
    """Write a byte into the values of a token."""
    problem.pool.view(torch.uint8)[slot, 11] = byte


def unusual(device) -> dict[str, Problem]:
    """Problems with bytes that caches seldom hold."""
    made = {
        "every value +-448": make_problem(1024, device, largest),
        "every value subnormal": make_problem(1024, device, subnormal),
        "NaN in a slot not referenced": make_problem(1024, device, normal),
        "NaN in a slot of request 1": make_problem(1024, device, normal),
        "e5m2, +inf in a slot of request 1": make_problem(1024, device, normal, kv="e5m2"),
        "e5m2, NaN in a slot of request 1": make_problem(1024, device, normal, kv="e5m2"),
    }
    for name, problem in made.items():
        slot = problem.pool.shape[0] - 1 if "not" in name else int(problem.indices[1, 500])
        if "in a slot" in name:
            poke(problem, slot, 0x7C if "inf" in name else 0x7F)
    return made


def outcome(out: torch.Tensor, exact: torch.Tensor) -> dict:
    """How many elements are NaN or infinite, and the relative error of those that are neither."""
    finite = out.isfinite() & exact.isfinite()
    diff = (out.double() - exact)[finite]
    return {
        "nan": int(out.isnan().sum()),
        "inf": int(out.isinf().sum()),
        "relative": float(diff.norm() / exact[finite].norm()),
    }


def look_at_unusual(device, kernels: dict[str, Callable]) -> list[dict]:
    """For each unusual problem the outcome of the kernels, and that of exact arithmetic."""
    looked = []
    for name, problem in unusual(device).items():
        exact = attend(problem)
        paths = {"exact": exact} | {key: path(problem, exact) for key, path in kernels.items()}
        looked.append({"what": name, **{key: outcome(out, exact) for key, out in paths.items()}})
    return looked


# ---- the table


def scientific(value: float) -> str:
    """1.65e-3; 0 stays 0."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(value))
    return f"{value / 10.0**exponent:.2f}e{exponent}"


def table(result: dict) -> str:
    """What the note says of a result file."""
    facts = result["machine"]
    paths = list(result["rows"][0]["paths"])
    lines = [
        f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}, torch {facts['torch']}, "
        f"commit {facts['commit'][:7]}, {facts['date'][:10]}; {BATCH} requests of {HEADS} heads.",
        "Relative error over all rows:",
        "",
        f"| tokens | logits | {' | '.join(paths)} |",
        "|---" * (2 + len(paths)) + "|",
    ]
    for row in result["rows"]:
        cells = [scientific(row["paths"][path]["relative"]) for path in paths]
        lines.append(f"| {row['kv_len']:,} | {row['logits']} | {' | '.join(cells)} |")
    kinds = [key for key in result["unusual"][0] if key != "what"]
    lines += [
        "",
        f"Of {BATCH * HEADS * CKV:,} elements, NaN / infinite / relative error of the others:",
        "",
        f"| cache | {' | '.join(kinds)} |",
        "|---" * (1 + len(kinds)) + "|",
    ]
    for case in result["unusual"]:
        cells = [
            f"{case[k]['nan']:,} / {case[k]['inf']:,} / {scientific(case[k]['relative'])}"
            for k in kinds
        ]
        lines.append(f"| {case['what']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(note: str, text: str) -> str:
    """The note with `text` between its two marks."""
    before, begin, rest = note.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The note must have the lines {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def default_path(gpu: str) -> Path:
    """Result file of a GPU."""
    return BENCH / "results" / "numerics" / f"{machine.slug(gpu)}.json"


def main(argv: list[str]) -> int:
    """Exit status: 0, or 2 with a sentence if there is nothing to measure or to write."""
    parser = argparse.ArgumentParser(description="Errors of every path against float64.")
    parser.add_argument("--table", action="store_true", help="write the results into the note")
    parser.add_argument("--file", type=Path, help="result file (default: by GPU, or the only one)")
    options = parser.parse_args(argv)
    if options.table:
        found = [options.file] if options.file else list(default_path("*").parent.glob("*.json"))
        if len(found) != 1:
            print(f"numerics: --file must say which of {len(found)} results.", file=sys.stderr)
            return 2
        NOTE.write_text(with_table(NOTE.read_text(), table(json.loads(found[0].read_text()))))
        return 0
    if not torch.cuda.is_available():
        print("numerics: a GPU is needed, torch finds none.", file=sys.stderr)
        return 2

    device = torch.device("cuda")
    rows = []
    for kv_len in KV_LENS:
        for logits in LOGITS:
            problem = make_problem(kv_len, device, normal)
            set_logits(problem, logits)
            paths = measure(problem, KERNELS | ROUNDINGS)
            rows.append({"kv_len": kv_len, "logits": logits, "paths": paths})
    result = {
        "machine": machine.facts(),
        "rows": rows,
        "unusual": look_at_unusual(device, KERNELS),
    }
    path = options.file or default_path(result["machine"]["gpu"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
