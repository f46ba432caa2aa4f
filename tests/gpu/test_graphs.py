"""CUDA graphs as SGLang uses them: capture with short requests, plan behind the graph, replay.

SGLang keeps the plan_info of the capture and calls `_cached_module.plan` itself before each replay,
so all that a captured launch depends on must outlive any later plan of the same workspace.
"""

from dataclasses import replace

import pytest
import torch
from mla_cases import (
    DEVICE,
    FP8,
    Case,
    Inputs,
    compare,
    make_inputs,
    new_wrapper,
    plan,
    reference,
    run,
    run_planned,
    workspace,
)

pytestmark = pytest.mark.gpu


class Graph:
    """A captured wrapper with its static buffers; `replay` plans and runs another batch in it."""

    def __init__(self, capture: Case, pages: int, tokens: int | None = None):
        self.case = capture
        batch = len(capture.kv_lens)
        width = 512 + capture.kpe
        tokens = sum(capture.q_lens) if tokens is None else tokens
        self.query = torch.zeros(tokens, capture.heads, width, device=DEVICE).bfloat16()
        shape = (pages, capture.page_size, width)
        self.pool = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
        self.out = torch.zeros(tokens, capture.heads, 512, device=DEVICE).bfloat16()
        self.lse = torch.zeros(tokens, capture.heads, device=DEVICE)

        def zeros(n):
            return torch.zeros(n, dtype=torch.int32, device=DEVICE)

        self.wrapper = new_wrapper(
            use_cuda_graph=True,
            qo_indptr=zeros(batch + 1),
            kv_indptr=zeros(batch + 1),
            kv_indices=zeros(pages),
            kv_len_arr=zeros(batch),
        )
        self.load(make_inputs(capture))
        plan(self.wrapper, self.inputs)
        self.run()  # loads the module outside of the capture
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def load(self, inputs: Inputs) -> None:
        self.inputs = inputs
        tokens = inputs.q_nope.shape[0]
        self.query[:tokens, :, :512] = inputs.q_nope
        self.query[:tokens, :, 512:] = inputs.q_pe
        pages = inputs.ckv.shape[0]
        self.pool[:pages, :, :512] = inputs.ckv.view(torch.uint8)
        self.pool[:pages, :, 512:] = inputs.kpe.view(torch.uint8)

    def run(self) -> None:
        pool = self.pool.view(FP8[self.case.kv])
        self.wrapper.run(
            self.query[..., :512],
            self.query[..., 512:],
            pool[..., :512],
            pool[..., 512:],
            out=self.out,
            lse=self.lse,
            return_lse=True,
        )

    def fast_plan(self, inputs: Inputs) -> None:
        """The words of SGLang's fast_mla_decode_plan, and its writes into the static buffers."""
        wrapper = self.wrapper
        wrapper._qo_indptr_buf.copy_(inputs.qo_indptr)
        wrapper._kv_indptr_buf.copy_(inputs.kv_indptr)
        wrapper._kv_indices_buf[: len(inputs.kv_indices)].copy_(inputs.kv_indices)
        wrapper._kv_len_arr_buf.copy_(inputs.kv_len)
        wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            inputs.qo_indptr.cpu(),
            inputs.kv_indptr.cpu(),
            inputs.kv_len.cpu(),
            inputs.case.heads,
            512,
            inputs.case.causal,
        )

    def replay(self, case: Case, fast=True):
        """Results of `case` from a replay; rows beyond its own are left as they were."""
        inputs = make_inputs(case)
        self.load(inputs)
        if fast:
            self.fast_plan(inputs)
        else:
            plan(self.wrapper, inputs)
        self.out.fill_(7)
        self.lse.fill_(7)
        self.graph.replay()
        tokens = sum(case.q_lens)
        return self.out[:tokens], self.lse[:tokens]


def require_right(case: Case, got) -> None:
    problems = compare(case, *got, *reference(make_inputs(case)))
    assert not problems, f"{problems}\nthe batch was: {case.line()}"


DECODE = Case((1,) * 8, (1,) * 8, 16)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "capture, replays",
    [
        (DECODE, [(9000,) * 8, (1, 0, 30000, 5, 64, 65, 700, 0), (0,) * 8, (1,) * 8]),
        (replace(DECODE, heads=128), [(3000,) * 8, (20000, 1, 1, 1, 1, 1, 1, 1)]),
        (
            Case((4,) * 8, (4,) * 8, 8, causal=True),
            [(9000,) * 8, (4, 5, 3000, 20, 64, 65, 700, 8)],
        ),
        (Case((1,) * 8, (16,) * 8, 8, page_size=16, kv="e5m2"), [(5000,) * 8, (1, 15, 16, 17) * 2]),
        (Case((1,), (1,), 8), [(200000,), (1,), (64,)]),
    ],
)
def test_capture_short_replay_long(capture, replays, fast):
    graph = Graph(capture, pages=max(sum(lens) for lens in replays) + 8)
    for seed, kv_lens in enumerate(replays):
        case = replace(capture, kv_lens=kv_lens, seed=seed)
        require_right(case, graph.replay(case, fast))


def test_replay_gives_the_bits_of_the_eager_run():
    graph = Graph(DECODE, pages=40000)
    case = replace(DECODE, kv_lens=(20000, 1, 0, 700, 64, 8000, 3, 500), seed=3)
    out, lse = graph.replay(case)
    eager_out, eager_lse = run(make_inputs(case))
    assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_a_dirty_float_workspace_between_replays(byte):
    graph = Graph(DECODE, pages=60000)
    for seed in range(3):
        workspace().fill_(byte)
        case = replace(DECODE, kv_lens=(30000, 1, 0, 700, 64, 8000, 3, 500), seed=seed)
        require_right(case, graph.replay(case))


def test_other_wrappers_run_and_plan_between_replays():
    first = Graph(DECODE, pages=60000)
    second = Graph(replace(DECODE, heads=128), pages=60000)
    for seed in range(3):
        for graph in (first, second):
            case = replace(graph.case, kv_lens=(5000, 1, 0, 700, 64, 8000, 3, 500), seed=seed)
            require_right(case, graph.replay(case))
            run(make_inputs(Case((64,), (3000,), 32, causal=True)))


def test_idle_rows_of_a_padded_batch():
    """SGLang pads a batch to the captured size with requests of one token, or of none."""
    graph = Graph(DECODE, pages=60000)
    for kv_lens in [(5000, 300, 1, 1, 1, 1, 1, 1), (5000, 300, 0, 0, 0, 0, 0, 0)]:
        case = replace(DECODE, kv_lens=kv_lens)
        require_right(case, graph.replay(case))


def test_rows_beyond_the_last_query_stay_untouched():
    graph = Graph(DECODE, pages=60000)
    case = replace(DECODE, q_lens=(1, 1, 1, 1, 1, 0, 0, 0), kv_lens=(5000, 300, 0, 64, 9, 0, 0, 5))
    require_right(case, graph.replay(case))
    assert bool((graph.out[5:] == 7).all()) and bool((graph.lse[5:] == 7).all())


def test_a_replay_keeps_the_tile_of_its_capture():
    """Lengths for which an eager plan takes another tile must still replay right."""
    heads, batch = 8, 4
    short = Case((1,) * batch, (1,) * batch, heads, causal=True)
    graph = Graph(short, pages=40000, tokens=batch * 40)
    captured = list(graph.wrapper._plan_info)
    many_rows = replace(short, q_lens=(40,) * batch, kv_lens=(3000,) * batch)
    eager = new_wrapper()
    plan(eager, make_inputs(many_rows))
    assert list(eager._plan_info)[1] != captured[1], "these lengths no longer choose another tile"
    for fast in (True, False):
        require_right(many_rows, graph.replay(many_rows, fast))
        assert list(graph.wrapper._plan_info)[:3] == captured[:3]


def test_many_more_items_than_ctas():
    """Far beyond upstream's 16,384 work items."""
    batch = 20000
    case = Case((1,) * batch, (3,) * batch, 2)
    inputs = make_inputs(case)
    problems = compare(case, *run(inputs), *reference(inputs))
    assert not problems, problems


@pytest.mark.parametrize("batch", [131, 132, 133, 263, 264, 265, 527, 528, 529, 1056, 4000])
def test_batches_around_the_number_of_ctas(batch):
    graph = Graph(Case((1,) * batch, (1,) * batch, 8, lse="base2"), pages=batch * 200)
    lens = tuple((37 * i) % 150 for i in range(batch))
    case = replace(graph.case, kv_lens=lens)
    require_right(case, graph.replay(case))


def test_the_integer_workspace_is_never_overrun():
    """A plan that does not fit is refused by name, and the wrapper still works."""
    wrapper = new_wrapper()
    tokens = 300_000
    case = Case((tokens,), (4,), 128)
    inputs = make_inputs(Case((1,), (4,), 128))
    inputs.case = case
    inputs.qo_indptr = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"integer workspace must hold \d+ bytes"):
        plan(wrapper, inputs)
    small = make_inputs(Case((1,), (4,), 128))
    plan(wrapper, small)
    problems = compare(small.case, *run_planned(wrapper, small), *reference(small))
    assert not problems, problems
