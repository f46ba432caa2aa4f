"""SGLang's real backend on FlashInfer's real, patched wrapper; only the compiled module is not.

What SGLang passes to plan() and run(), and what it writes into a wrapper when it replays a graph,
has to get through the wrapper's own checks and arrive at the module as it should.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang", reason="needs the sglang environment: ./build.sh test --sglang")

import stand_in  # noqa: E402
import steps  # noqa: E402
from test_plugin import backend_of, replaced  # noqa: E402


@pytest.fixture
def cpu_module(module, monkeypatch):
    """Our wheel's wrapper in SGLang's module, on a pretended SM89, with CpuModule behind it."""
    import flashinfer.mla
    import mla_fp8kv.capability
    import mla_fp8kv.jit
    from flashinfer.mla._batch_mla import _auto_policy, _wrapper
    from flashinfer.mla._batch_mla._backends import _fa_common

    for place, name in (
        (mla_fp8kv.capability, "compute_capability"),
        (_wrapper, "_get_compute_capability"),
        (_auto_policy, "_get_compute_capability"),
        (_fa_common, "get_compute_capability"),
    ):
        monkeypatch.setattr(place, name, lambda _=None: (8, 9))
    made = stand_in.CpuModule()
    monkeypatch.setattr(mla_fp8kv.jit, "get_module", lambda dtype, kpe: made)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper
    monkeypatch.setattr(module, "BatchMLAPagedAttentionWrapper", wrapper)
    return made


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("step", steps.ALL)
def test_through_the_real_wrapper(module, load, pool, step, kv_dtype, request, said):
    kv = pool(kv_dtype)
    expected = steps.ALL[step](backend_of(module, kv))  # SGLang's cast, CpuMlaWrapper
    cpu_module = request.getfixturevalue("cpu_module")
    load()
    backend = backend_of(module, kv)
    assert replaced(backend), said()
    tried = cpu_module.runs
    assert tried == 2, "the trial: one token for decode's plan and one for prefill's"
    with stand_in.PoolSpy(kv) as spy:
        assert torch.equal(steps.ALL[step](backend), expected)
    assert spy.casts == [] and cpu_module.runs > tried


def test_refusal_is_quoted(cpu_module, module, load, pool, said, monkeypatch):
    """A GPU that the kernel does not take: SGLang keeps its cast and the line says which."""
    import mla_fp8kv.capability

    monkeypatch.setattr(mla_fp8kv.capability, "compute_capability", lambda _: (7, 5))
    load()
    assert replaced(backend_of(module, pool())) == set()
    ((level, line),) = said()
    assert level == "WARNING" and "SGLang keeps its cast" in line and "7.5" in line
