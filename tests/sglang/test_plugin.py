"""The plug-in in SGLang's real package, loaded by SGLang's own load_plugins()."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang", reason="needs the sglang environment: ./build.sh test --sglang")

import stand_in  # noqa: E402
import steps  # noqa: E402

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HOOKED = {
    "FlashInferMLAAttnBackend": ("forward_decode", "forward_extend"),
    "FlashInferMLAIndicesUpdaterDecode": ("call_begin_forward",),
    "FlashInferMLAIndicesUpdaterPrefill": ("call_begin_forward",),
}


def functions(module):
    """Every function of the module's classes except the one that the hook is on."""
    return {
        (name, attribute): value
        for name, cls in vars(module).items()
        if isinstance(cls, type) and cls.__module__ == module.__name__
        for attribute, value in vars(cls).items()
        if callable(value) and (name, attribute) != ("FlashInferMLAAttnBackend", "__init__")
    }


def backend_of(module, pool, **options):
    return module.FlashInferMLAAttnBackend(stand_in.model_runner(pool, **options), False)


def replaced(backend):
    """Names of the methods that are the object's own and not SGLang's."""
    objects = (backend, backend.indices_updater_decode, backend.indices_updater_prefill)
    return {
        (type(item).__name__, name)
        for item in objects
        for name in ("forward_decode", "forward_extend", "call_begin_forward")
        if name in vars(item)
    }


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("step", steps.ALL)
def test_no_cast_of_the_pool(module, load, pool, step, kv_dtype):
    kv = pool(kv_dtype)
    cast_backend = backend_of(module, kv)
    with stand_in.PoolSpy(kv) as spy:
        expected = steps.ALL[step](cast_backend)
    assert spy.casts, "the spy must see SGLang's own cast"
    assert {plan.kv for plan in stand_in.CpuMlaWrapper.plans} == {torch.bfloat16}
    stand_in.CpuMlaWrapper.plans.clear()
    stand_in.CpuMlaWrapper.runs.clear()

    load()
    backend = backend_of(module, kv)
    with stand_in.PoolSpy(kv) as spy:
        actual = steps.ALL[step](backend)
    assert spy.casts == []
    assert {(plan.q, plan.kv) for plan in stand_in.CpuMlaWrapper.plans} == {
        (torch.bfloat16, kv_dtype)
    }
    assert {run.kv for run in stand_in.CpuMlaWrapper.runs} == {kv_dtype}
    # FP8 widens to bfloat16 exactly, so the same arithmetic gives the same bits.
    assert torch.equal(actual, expected)


def test_runs_on_the_pools_own_memory(module, load, pool):
    load()
    kv = pool()
    steps.decode(backend_of(module, kv), layer_id=1)
    assert stand_in.CpuMlaWrapper.runs[-1].ptr == kv.kv_buffer[1].data_ptr()


def test_query_keeps_the_models_dtype(module, load, pool):
    load()
    backend = backend_of(module, pool(), dtype=torch.float16)
    for step in (steps.decode, steps.extend, steps.verify):
        assert step(backend, dtype=torch.float16).dtype == torch.float16
    assert {plan.q for plan in stand_in.CpuMlaWrapper.plans} == {torch.float16}


def test_plans_are_otherwise_as_before(module, load, pool):
    kv = pool()
    for step in steps.ALL.values():
        step(backend_of(module, kv))
    before = [vars(plan) | {"kv": None} for plan in stand_in.CpuMlaWrapper.plans]
    stand_in.CpuMlaWrapper.plans.clear()
    load()
    backends = [backend_of(module, kv) for _ in steps.ALL]
    stand_in.CpuMlaWrapper.plans.clear()  # without the trial of the kernel
    for backend, step in zip(backends, steps.ALL.values(), strict=True):
        step(backend)
    assert [vars(plan) | {"kv": None} for plan in stand_in.CpuMlaWrapper.plans] == before


def test_idle_batch(module, load, pool):
    load()
    assert steps.decode(backend_of(module, pool()), seq_lens=()).shape == (0, 8 * 512)


def test_draft_backends(module, load, pool):
    load()
    draft = module.FlashInferMLAMultiStepDraftBackend(stand_in.model_runner(pool()), 1, 4)
    assert len(draft.attn_backends) == 3
    for backend in draft.attn_backends:
        steps.decode(backend)
    assert {run.kv for run in stand_in.CpuMlaWrapper.runs} == {torch.float8_e4m3fn}


def test_kernel_is_tried_once_a_process(module, load, pool):
    load()
    module.FlashInferMLAMultiStepDraftBackend(stand_in.model_runner(pool()), 1, 4)
    assert len(stand_in.CpuMlaWrapper.plans) == 1
    assert stand_in.CpuMlaWrapper.plans[0].heads == 8


def test_context_parallel(module, load, pool, monkeypatch):
    """Decode returns LSE; extend reads the gathered FP8 buffer instead of the pool."""
    from types import SimpleNamespace

    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_parallel

    load()
    kv = pool()
    backend = backend_of(module, kv)
    batch = stand_in.batch(ForwardMode.DECODE, [40])
    backend.init_forward_metadata(batch)
    with monkeypatch.context() as patch:
        patch.setattr(module, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
        out, lse = backend.forward_decode(
            steps.queries(1), None, None, stand_in.layer(), batch, save_kv_cache=False
        )
    assert get_parallel().dcp_enabled is False
    assert out.shape == (1, 8 * 512) and lse.shape == (1, 8) and lse.isfinite().all()

    gathered = kv.get_key_buffer(0)[1:41].clone()
    batch = stand_in.batch(ForwardMode.EXTEND, [40], prefix_lens=[38])
    batch.attn_dcp_metadata = SimpleNamespace(
        dcp_kv_buffer=gathered,
        dcp_kv_indptr=torch.tensor([0, 40], dtype=torch.int32),
        dcp_kv_indices=torch.arange(40, dtype=torch.int32),
    )
    backend.init_forward_metadata(batch)
    backend.forward_extend(
        steps.queries(2), None, None, stand_in.layer(), batch, save_kv_cache=False
    )
    run = stand_in.CpuMlaWrapper.runs[-1]
    assert (run.kv, run.ptr) == (torch.float8_e4m3fn, gathered.data_ptr())


def test_says_once_that_it_is_active(module, load, pool, said):
    load()
    kv = pool()
    for _ in range(3):
        backend_of(module, kv)
    ((level, line),) = said()
    assert level == "INFO"
    for word in ("active on cpu", "float8_e4m3fn", "forward_decode", "forward_extend", "0.5.23"):
        assert word in line, line


def test_tracebacks_point_into_sglangs_file(module, load, pool):
    load()
    backend = backend_of(module, pool())
    code = backend.forward_decode.__func__.__code__
    original = module.FlashInferMLAAttnBackend.forward_decode.__code__
    assert (code.co_filename, code.co_firstlineno) == (
        original.co_filename,
        original.co_firstlineno,
    )
    assert backend.forward_decode.__func__.__globals__ is vars(module)


def test_sglangs_classes_keep_their_functions(module, load, pool):
    before = functions(module)
    load()
    steps.decode(backend_of(module, pool()))
    assert functions(module) == before
    assert not [name for name in vars(module) if "mla_fp8kv" in name]


# What leaves SGLang as it is. Each case ends in the same check: SGLang's functions everywhere, its
# cast in the step, and exactly one line that says why.


def check_untouched(module, pool, said, expected, **options):
    before = functions(module)
    backend = backend_of(module, pool, **options)
    assert replaced(backend) == set()
    with stand_in.PoolSpy(pool) as spy:
        steps.decode(backend)
    assert {plan.kv for plan in stand_in.CpuMlaWrapper.plans} == {torch.bfloat16}
    assert bool(spy.casts) == (pool.dtype.itemsize == 1)
    assert functions(module) == before
    lines = [line for _, line in said()]
    assert len(lines) == 1 and expected in lines[0], lines


def test_bfloat16_pool(module, load, pool, said):
    load()
    check_untouched(module, pool(torch.bfloat16), said, "nothing to do")


def test_kernel_that_refuses(module, load, pool, said, monkeypatch):
    monkeypatch.setattr(stand_in.CpuMlaWrapper, "refuses_fp8", "heads must be fewer, got 8.")
    load()
    check_untouched(module, pool(), said, "heads must be fewer, got 8.")


def test_switched_off(module, load, pool, said, monkeypatch):
    monkeypatch.setenv("MLA_FP8KV_SGLANG", "0")
    load()
    assert not hasattr(module.FlashInferMLAAttnBackend.__init__, "__wrapped__")
    check_untouched(module, pool(), said, "off by MLA_FP8KV_SGLANG=0")


def test_not_in_sglang_plugins(module, load, pool, said, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "something_else")
    load()
    assert not hasattr(module.FlashInferMLAAttnBackend.__init__, "__wrapped__")
    assert replaced(backend_of(module, pool())) == set()
    assert said() == []


def test_flashinfer_of_somebody_else(module, load, pool, said, monkeypatch):
    from mla_fp8kv import installed

    monkeypatch.setattr(installed, "flashinfer_is_ours", lambda: False)
    load()
    assert not hasattr(module.FlashInferMLAAttnBackend.__init__, "__wrapped__")
    check_untouched(module, pool(), said, "is not the build with FP8 KV for MLA")


def test_other_plugin_in_the_same_place(module, load, pool, said):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    calls = []
    HookRegistry.register(
        f"{module.__name__}.FlashInferMLAAttnBackend.forward_decode",
        lambda original, *args, **kwargs: calls.append(1) or original(*args, **kwargs),
        HookType.AROUND,
    )
    original = module.FlashInferMLAAttnBackend.forward_decode
    load()
    try:
        check_untouched(module, pool(), said, "another plug-in has changed")
        assert calls, "the other plug-in must still be in place"
    finally:
        module.FlashInferMLAAttnBackend.forward_decode = original


def test_function_changed_before_us(module, load, pool, said, monkeypatch):
    changed = lambda self, *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr(module.FlashInferMLAAttnBackend, "forward_extend", changed)
    load()
    assert not hasattr(module.FlashInferMLAAttnBackend.__init__, "__wrapped__")
    check_untouched(module, pool(), said, "forward_extend is not the function in")


def test_updater_of_an_unknown_class(module, load, pool, said, monkeypatch):
    """Planning by a class that is not rebuilt would not fit the rebuilt forward functions."""
    load()
    init = module.FlashInferMLAIndicesUpdaterDecode.__init__

    class Other(module.FlashInferMLAIndicesUpdaterDecode):
        pass

    def becomes_other(self, *args):
        init(self, *args)
        self.__class__ = Other

    monkeypatch.setattr(module.FlashInferMLAIndicesUpdaterDecode, "__init__", becomes_other)
    check_untouched(module, pool(), said, "unexpected classes, FlashInferMLAAttnBackend, Other")


def test_dsa_rows(module, load, pool, said):
    load()
    dsa = pool(use_dsa=True, override_kv_cache_dim=656)
    backend = backend_of(module, dsa)
    assert replaced(backend) == set()
    ((level, line),) = said()
    assert level == "WARNING" and "rows of 576" in line and "656" in line


def test_fp4_pool(module, load, said):
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPoolFP4

    fp4 = MLATokenToKVPoolFP4(64, 1, torch.float4_e2m1fn_x2, 512, 64, 1, "cpu", False)
    load()
    backend = backend_of(module, fp4, requests=1, context=32)
    assert replaced(backend) == set()
    ((_, line),) = said()
    assert "nothing to do" in line and "float4" in line


def test_subclass_with_its_own_fp8_path(module, load, pool, said):
    class FlashMLABackend(module.FlashInferMLAAttnBackend):
        pass

    load()
    backend = FlashMLABackend(stand_in.model_runner(pool()), False)
    assert replaced(backend) == set() and said() == []
