"""Random batches against float64: a seeded sampler, one line to repeat a failure.

MLA_FP8KV_CASES sets the number of cases, MLA_FP8KV_SEED the first seed.
"""

import os
import random

import pytest
import torch
from mla_cases import Case, compare, make_inputs, new_wrapper, plan, reference, run_planned

COUNT = int(os.environ.get("MLA_FP8KV_CASES", "400"))
FIRST = int(os.environ.get("MLA_FP8KV_SEED", "0"))
CHUNK = 50
# Query rows x tokens of a case, and each alone: what keeps 400 within two minutes of an H200.
WORK = 1 << 26
ROWS = 200_000
TOKENS = 60_000


def lengths(pick: random.Random, batch: int) -> tuple:
    """Cached lengths with a few long ones, many short ones and some empty ones."""
    edges = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
    long = pick.choice((64, 600, 5000, 20000))

    def one():
        kind = pick.random()
        if kind < 0.15:
            return 0
        if kind < 0.4:
            return pick.choice(edges)
        return int(long * pick.random() ** pick.choice((1, 4)))

    values, left = [], TOKENS
    for _ in range(batch):
        value = min(one(), left)
        left -= value
        values.append(value)
    return tuple(values)


def sample(seed: int) -> Case:
    """The case of a seed: every option that a caller can combine."""
    pick = random.Random(seed)
    heads = pick.choice((pick.randint(1, 128), pick.choice((1, 2, 4, 8, 12, 16, 20, 32, 64, 128))))
    batch = pick.choice((1, 1, 2, 3, 8, 17, 64, pick.randint(0, 300)))
    kv_lens = lengths(pick, batch)
    most = pick.choice((1, 1, 1, 2, 4, 8, 40, 300))
    q_lens = tuple(pick.choice((most, pick.randint(0, most))) for _ in range(batch))

    def too_large():
        pairs = sum(q * kv for q, kv in zip(q_lens, kv_lens, strict=True))
        return pairs * heads > WORK or sum(q_lens) * heads > ROWS

    while too_large():
        q_lens = tuple(-(-q // 2) for q in q_lens)
        if max(q_lens) == 1:
            kv_lens = tuple(kv // 2 for kv in kv_lens)
    group_scales = pick.random() < 0.15
    return Case(
        q_lens,
        kv_lens,
        heads,
        page_size=pick.choice((1, 1, 1, 2, 3, 8, 16, 32, 64, 100, 128)),
        causal=pick.random() < 0.5,
        kv=pick.choice(("e4m3", "e4m3", "e5m2")),
        q=pick.choice(("bf16", "bf16", "fp16")),
        kpe=pick.choice((64, 64, 64, 0)),
        layout=pick.choice(("sglang", "sglang", "separate", "layers")),
        pages=pick.choice(("shuffled", "ordered", "shared")),
        poison=pick.random() < 0.5,
        ckv_scale=None if group_scales else pick.choice((None, None, 1.0, 0.06, 4.0)),
        kpe_scale=pick.choice((None, None, 1.0, 0.3, 4.0)),
        group_scales=group_scales,
        lse=pick.choice((None, "base2", "basee")),
        sm_scale=pick.choice((0.07, 0.02, 0.3)),
        seed=seed,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, CHUNK))
def test_random_cases(first):
    """Wrappers take turns with one workspace, some of them on a stream of their own."""
    failures = []
    wrappers = {}
    side = torch.cuda.Stream()
    for seed in range(first, min(first + CHUNK, FIRST + COUNT)):
        case = sample(seed)
        inputs = make_inputs(case)
        want = reference(inputs)
        # One of three wrappers is planned again and again for whatever comes.
        wrapper = wrappers.setdefault(seed % 3, new_wrapper(("auto", "fa2")[seed % 2]))
        stream = side if seed % 4 == 3 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                plan(wrapper, inputs)
                got = run_planned(wrapper, inputs)
            torch.cuda.current_stream().wait_stream(stream)
            problems = compare(case, *got, *want)
        except (ValueError, RuntimeError) as error:
            problems = [f"{type(error).__name__}: {error}"]
        if problems:
            failures.append(f"{'; '.join(problems)}\n  repeat with: {case.line()}")
        side.synchronize()
    assert not failures, "\n".join(failures)


def test_the_sampler_reaches_what_it_names():
    cases = [sample(seed) for seed in range(max(COUNT, 200))]
    assert {case.kv for case in cases} == {"e4m3", "e5m2"}
    assert {case.q for case in cases} == {"bf16", "fp16"}
    assert {case.layout for case in cases} == {"sglang", "separate", "layers"}
    assert {case.lse for case in cases} == {None, "base2", "basee"}
    assert any(case.group_scales for case in cases)
    assert any(max(case.kv_lens, default=0) > 10_000 for case in cases)
    assert any(max(case.q_lens, default=0) > 200 for case in cases)
    assert any(len(case.kv_lens) > 200 for case in cases)
    assert any(len(case.kv_lens) == 0 or sum(case.kv_lens) == 0 for case in cases)
