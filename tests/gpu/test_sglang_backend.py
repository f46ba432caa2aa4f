"""SGLang's real FlashInferMLAAttnBackend on the GPU, with its cast and with the plug-in.

Real: the backend, its pool and pool writes, the plug-in framework, FlashInfer. Stood in for: the
model runner and the request table's gather (tests/sglang/stand_in.py).
"""

import logging
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU on this machine", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

import real_sglang  # noqa: E402
from flashinfer_base import BASE, FLAT  # noqa: E402

if FLAT:
    pytest.skip(
        f"SGLang {real_sglang.VERSION} is for FlashInfer 0.7.2, this is {BASE}",
        allow_module_level=True,
    )
if reason := real_sglang.why_not():
    pytest.skip(reason, allow_module_level=True)

import stand_in  # noqa: E402
import steps  # noqa: E402

pytestmark = pytest.mark.gpu

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REQUESTS, CONTEXT = 4, 16384
# Both paths end in one rounding to bfloat16; ours has no BF16 P and may not be worse.
ERROR_RATIO = 1.1


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    real_sglang.load_plugin(tmp_path_factory.mktemp("entry-point"))


@pytest.fixture(scope="module", params=FP8, ids=["e4m3", "e5m2"])
def pool(request):
    return real_sglang.make_pool(request.param, REQUESTS * CONTEXT + 7, layers=2)


@pytest.fixture(params=[8, 16, 128])
def backends(request, pool):
    return real_sglang.make_backends(
        pool, heads=request.param, requests=REQUESTS, context=CONTEXT, device="cuda"
    )


def reference(backend, q, heads, layer_id, lengths):
    """Attention in float64: request i's queries are the last tokens of its lengths[i] = (q, kv)."""
    pool = backend.token_to_kv_pool
    q = q.view(-1, heads, stand_in.ROW).double()
    outputs, first = [], 0
    for row, (queries, kv_len) in enumerate(lengths):
        slots = backend.req_to_token_pool.req_to_token[row, :kv_len].long()
        kv = pool.kv_buffer[layer_id][slots, 0].view(pool.dtype).double()
        scores = torch.einsum("qhd,kd->qhk", q[first : first + queries], kv) * stand_in.SCALE
        last = torch.arange(queries, device=q.device)[:, None] + kv_len - queries
        hidden = torch.arange(kv_len, device=q.device) > last
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        outputs.append(torch.einsum("qhk,kd->qhd", scores.softmax(-1), kv[:, : stand_in.CKV]))
        first += queries
    return torch.cat(outputs).view(first, -1)


def error(output, expected):
    return ((output.double() - expected).norm() / expected.norm()).item()


STEPS = {
    # name: (step, its lengths, (queries, kv) a request)
    "decode": (steps.decode_step, ((500, 1, 4096, 13),), [(1, 500), (1, 1), (1, 4096), (1, 13)]),
    "extend": (
        steps.extend_step,
        ((2471, 1, 5909), (700, 33, 64)),
        [(700, 3171), (33, 34), (64, 5973)],
    ),
    "verify": (steps.verify_step, ((12, 2500, 500),), [(4, 16), (4, 2504), (4, 504)]),
    "draft extend": (steps.draft_extend_step, ((12, 2500),), [(4, 16), (4, 2504)]),
}


@pytest.mark.parametrize("name", STEPS)
def test_as_close_as_the_cast_path(backends, name):
    make_step, arguments, lengths = STEPS[name]
    outputs, casts = [], []
    for backend in backends:
        heads = backend.indices_updater_decode.num_local_heads
        step = make_step(backend, *arguments, write=True, heads=heads)
        with stand_in.PoolSpy(backend.token_to_kv_pool) as spy:
            backend.init_forward_metadata(step.batch)
            outputs.append(step.attention(layer_id=1))
        casts.append(len(spy.casts))
    assert casts[0] > 0 and casts[1] == 0
    expected = reference(backends[1], step.q, heads, 1, lengths)
    cast_error, our_error = (error(output, expected) for output in outputs)
    print(f"{name}, {heads} heads: error {our_error:.2e}, with the cast {cast_error:.2e}")
    assert our_error <= ERROR_RATIO * cast_error


def graph_of(backend, make_step, requests, tokens_per_request, heads):
    """Capture one layer of a step; returns replay(seq_lens, q) -> output."""
    backend.init_cuda_graph_state(requests, requests * tokens_per_request)
    captured = make_step(backend, (1,) * requests, heads=heads)
    backend.init_forward_metadata_out_graph(captured.batch, in_capture=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured.attention()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = captured.attention()

    def replay(seq_lens, q):
        captured.q.copy_(q)
        step = make_step(backend, seq_lens, heads=heads)
        backend.init_forward_metadata_out_graph(step.batch)
        graph.replay()
        return output.clone()

    return replay


@pytest.mark.parametrize(
    "make_step, queries",
    [(steps.decode_step, 1), (steps.verify_step, 4)],
    ids=["decode", "verify"],
)
def test_graph_replays_with_growing_sequences(backends, make_step, queries):
    requests = 3
    cast, ours = backends
    heads = ours.indices_updater_decode.num_local_heads
    replays = [graph_of(backend, make_step, requests, queries, heads) for backend in backends]
    lengths = [(1, 2, 3), (500, 1, 77), (501, 2, 78), (4096, 8000, 1), (12000, 9, 12345)]
    for seq_lens in lengths:
        q = steps.queries(requests * queries, heads, seed=sum(seq_lens), device="cuda")
        cast_output, our_output = (replay(seq_lens, q) for replay in replays)
        new = queries if queries > 1 else 0  # verify's tokens come on top of its seq_lens
        expected = reference(ours, q, heads, 0, [(queries, n + new) for n in seq_lens])
        assert error(our_output, expected) <= ERROR_RATIO * error(cast_output, expected), seq_lens
        step = make_step(ours, seq_lens, heads=heads)
        step.q.copy_(q)
        ours.init_forward_metadata(step.batch)
        eager_output = step.attention()
        # The eager plan may cut the work elsewhere, so the bits may differ, the answer may not.
        assert error(eager_output, expected) <= ERROR_RATIO * error(cast_output, expected)
        assert torch.equal(replays[1](seq_lens, q), our_output), "a second replay, same bits"


def test_idle_rank(backends):
    """DP attention's idle rank: an empty decode batch."""
    _, ours = backends
    heads = ours.indices_updater_decode.num_local_heads
    assert steps.decode(ours, seq_lens=(), heads=heads).shape == (0, heads * 512)


def test_lse_for_context_parallel(backends, monkeypatch):
    """Decode returns base-2 LSE under context parallel; two shards merge to the whole answer."""
    from types import SimpleNamespace

    module = sys.modules[type(backends[1]).__module__]
    _, ours = backends
    heads = ours.indices_updater_decode.num_local_heads
    whole = steps.decode_step(ours, (900,), heads=heads)
    expected = reference(ours, whole.q, heads, 0, [(1, 900)])
    table = ours.req_to_token_pool.req_to_token
    before = table.clone()
    parts = []
    for shard in (slice(0, 350), slice(350, 900)):
        length = shard.stop - shard.start
        table[0, :length] = before[0, shard]
        step = steps.decode_step(ours, (length,), heads=heads)
        ours.init_forward_metadata(step.batch)
        with monkeypatch.context() as patch:
            patch.setattr(module, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
            out, lse = step.attention()
        parts.append((out.view(heads, 512).double(), lse.view(heads, 1).double()))
    table.copy_(before)
    weights = torch.softmax(torch.stack([lse for _, lse in parts]) * math.log(2), dim=0)
    merged = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    assert error(merged.view(1, -1), expected) < 4e-3  # two bfloat16 roundings


def test_log_line_names_the_gpu(pool, caplog, monkeypatch):
    from mla_fp8kv import sglang as plugin_module

    monkeypatch.setattr(plugin_module, "_said", set())
    caplog.set_level(logging.INFO, logger="mla_fp8kv.sglang")
    real_sglang.make_backends(pool, requests=1, context=64, device="cuda")
    (line,) = [r.getMessage() for r in caplog.records if "active on" in r.getMessage()]
    assert torch.cuda.get_device_name() in line and str(pool.dtype) in line
