"""One decode step of SGLang's real backend, with its cast and with the plug-in.

    python bench/sglang_step.py [--layers 78] [--slots 495552] [--heads 8] [--kv-len 500]

The attention of every layer of one decode step, in one CUDA graph, as SGLang captures it: the new
token's KV is written to the pool, then attention reads it. One request, the pool that started this
project. Needs a GPU and sglang, installed or packed (bench/pack_sglang.py). Writes
bench/results/sglang/<gpu>.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from mla_bench import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "sglang"))
import real_sglang  # noqa: E402

NO_SGLANG = real_sglang.why_not()  # puts the packed slice on the path
if NO_SGLANG is None:
    import steps

RESULTS = ROOT / "bench" / "results" / "sglang"
REPLAYS = 20
DELAY_BYTES = 4 << 30  # a memset of about a millisecond


def all_layers(step: steps.Step, layers: int) -> None:
    for layer in range(layers):
        step.attention(layer)


def profiled(step: steps.Step, layers: int) -> tuple[dict[str, float], float]:
    """(kernel name -> us on the GPU, us in copies of the whole pool), of one eager step."""
    slots = step.backend.token_to_kv_pool.size
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        all_layers(step, layers)
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    pool_us = 0.0
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name] = kernels.get(event.name, 0.0) + event.time_range.elapsed_us()
        elif event.name == "aten::copy_" and event.input_shapes[0][:1] >= [slots]:
            pool_us += event.device_time_total
    return kernels, pool_us


def measure(backend, layers: int, kv_len: int, heads: int) -> dict:
    """Times of one step: the graph on the GPU, plan and graph on the host's clock, pool copies."""
    step = steps.decode_step(backend, (kv_len,), write=True, heads=heads)
    backend.init_forward_metadata(step.batch)
    all_layers(step, layers)  # compiles and allocates whatever is lazy
    kernels, pool_us = profiled(step, layers)

    backend.init_cuda_graph_state(1, 1)
    backend.init_forward_metadata_out_graph(step.batch, in_capture=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_layers(step, layers)
    gpu_us, step_us = [], []
    delay = torch.empty(DELAY_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        delay.zero_()  # so that the host's launch is over when the graph begins
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        gpu_us.append(start.elapsed_time(end) * 1e3)
    for _ in range(REPLAYS):
        began = time.perf_counter()
        backend.init_forward_metadata_out_graph(step.batch)
        graph.replay()
        torch.cuda.synchronize()
        step_us.append((time.perf_counter() - began) * 1e6)

    total = sum(kernels.values())
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:6]
    return {
        "graph_us": statistics.median(gpu_us),
        "step_us": statistics.median(step_us),
        "eager_kernels_us": total,
        "pool_copies_us": pool_us,
        "pool_copies_share": pool_us / total,
        "longest_kernels": [{"name": name[:120], "us": us} for name, us in longest],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=78)
    parser.add_argument("--slots", type=int, default=495_552)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-len", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("sglang_step: needs a CUDA GPU.", file=sys.stderr)
        return 2
    if NO_SGLANG is not None:
        print(f"sglang_step: {NO_SGLANG}.", file=sys.stderr)
        return 2

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        real_sglang.load_plugin(Path(folder))
    pool = real_sglang.make_pool(torch.float8_e4m3fn, options.slots, options.layers)
    backends = real_sglang.make_backends(
        pool, heads=options.heads, requests=1, context=2 * options.kv_len, device="cuda"
    )
    paths = {}
    for name, backend in zip(("cast", "native"), backends, strict=True):
        paths[name] = measure(backend, options.layers, options.kv_len, options.heads)
        torch.cuda.empty_cache()

    print(
        f"{options.layers} layers, pool of {options.slots:,} tokens, {options.heads} heads, one "
        f"request of {options.kv_len} tokens"
    )
    print(f"{'':8}{'graph':>12}{'with plan':>12}{'pool copies':>13}{'share':>8}   us")
    for name, row in paths.items():
        print(
            f"{name:8}{row['graph_us']:12,.0f}{row['step_us']:12,.0f}"
            f"{row['pool_copies_us']:13,.0f}{row['pool_copies_share']:8.1%}"
        )
    print(f"{paths['cast']['graph_us'] / paths['native']['graph_us']:.0f}x")

    facts = machine.facts()
    out = options.out or RESULTS / f"{machine.slug(facts['gpu'])}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    shape = {name: getattr(options, name) for name in ("layers", "slots", "heads", "kv_len")}
    result = {"machine": facts, "sglang": real_sglang.VERSION, "shape": shape, "paths": paths}
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
