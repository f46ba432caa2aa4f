"""The module's specification: its name, sources, flags, and where a compiled copy is found."""

import subprocess
import sys
from pathlib import Path

import mla_fp8kv
import pytest
import torch
from calls import BF16, E4M3, E5M2
from flashinfer_base import FLAT

PACKAGE = Path(mla_fp8kv.__file__).resolve().parent
KERNEL = PACKAGE / "kernel"
MODULES = {
    (E4M3, 64, False): "mla_fp8kv_1_kv_e4m3_kpe_64",
    (E4M3, 0, False): "mla_fp8kv_1_kv_e4m3_kpe_0",
    (E5M2, 64, False): "mla_fp8kv_1_kv_e5m2_kpe_64",
    (E4M3, 64, True): "mla_fp8kv_1_kv_e4m3_kpe_64_bits",
    (E4M3, 64, False, True): "mla_fp8kv_1_kv_e4m3_kpe_64_loads",
}


@pytest.fixture
def jit(flashinfer):
    import mla_fp8kv.jit

    return mla_fp8kv.jit


@pytest.mark.parametrize("key", MODULES)
def test_specification(jit, key):
    spec = jit.gen_module(*key)
    assert spec.name == jit.module_uri(*key) == MODULES[key]
    assert [path.name for path in spec.sources] == ["mla_fp8kv_plan.cu", "mla_fp8kv_run.cu"]
    assert all(path.is_file() and path.is_relative_to(KERNEL) for path in spec.sources)
    assert spec.extra_include_dirs == [KERNEL]
    flags = spec.extra_cuda_cflags
    assert f"-DMLA_FP8KV_E5M2={int(key[0] == E5M2)}" in flags
    assert f"-DMLA_FP8KV_KPE={key[1]}" in flags
    assert f"-DMLA_FP8KV_DEQUANT_BITS={int(key[2])}" in flags
    assert ("-DMLA_FP8KV_LOADS_ONLY=1" in flags) == (key[3:] == (True,))
    assert {"-std=c++17", "-O3", "-DNDEBUG", "-Xptxas=-warn-spills"} <= set(flags)
    assert "-use_fast_math" not in flags
    assert not any(flag.startswith("-gencode") for flag in flags)


def test_names_are_ours_alone(jit, flashinfer):
    from flashinfer.jit.attention.modules import get_batch_mla_uri

    upstream = {
        get_batch_mla_uri(backend, BF16, E4M3, BF16, torch.int32, 512, kpe, False)
        for backend in ("fa2", "fa3")
        for kpe in (64, 0)
    }
    assert not upstream & set(MODULES.values())
    assert len(set(MODULES.values())) == len(MODULES)


def test_an_ahead_of_time_copy_is_found_by_name(jit, flashinfer, tmp_path, monkeypatch):
    from flashinfer.jit import env as jit_env

    monkeypatch.setattr(jit_env, "FLASHINFER_AOT_DIR", tmp_path)
    spec = jit.gen_module(E4M3, 64)
    assert not spec.is_aot
    library = tmp_path / spec.name / f"{spec.name}.so"
    library.parent.mkdir()
    library.touch()
    assert spec.is_aot
    assert spec.get_library_path() == library


@pytest.mark.parametrize("archs, good", [({(9, "0a"), (8, "0")}, True), ({(9, "0")}, False)])
def test_sm90_is_compiled_with_its_own_instructions(jit, monkeypatch, archs, good):
    monkeypatch.setattr(jit.current_compilation_context, "TARGET_CUDA_ARCHS", archs)
    if good:
        jit.check_architectures()
    else:
        with pytest.raises(RuntimeError, match=r"FLASHINFER_CUDA_ARCH_LIST must name it 9\.0a"):
            jit.check_architectures()


def test_a_load_asks_for_the_architectures_first(jit, monkeypatch):
    monkeypatch.setattr(jit.current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0")})
    monkeypatch.setattr(jit, "FileLock", None)  # would be called next
    with pytest.raises(RuntimeError, match="9.0a"):
        jit._load.__wrapped__(E4M3, 64, False, False)


def test_environment_selects_the_conversion(jit, monkeypatch):
    loaded = []
    monkeypatch.setattr(jit, "_load", lambda *key: loaded.append(key))
    for value in (None, "", "bits"):
        if value is None:
            monkeypatch.delenv("MLA_FP8KV_DEQUANT", raising=False)
        else:
            monkeypatch.setenv("MLA_FP8KV_DEQUANT", value)
        jit.get_module(E4M3, 64)
    monkeypatch.setenv("MLA_FP8KV_LOADS_ONLY", "1")
    jit.get_module(E4M3, 64)
    assert loaded == [
        (E4M3, 64, False, False),
        (E4M3, 64, False, False),
        (E4M3, 64, True, False),
        (E4M3, 64, True, True),
    ]
    monkeypatch.setenv("MLA_FP8KV_LOADS_ONLY", "yes")
    with pytest.raises(ValueError) as refusal:
        jit.get_module(E4M3, 64)
    assert str(refusal.value) == "MLA_FP8KV_LOADS_ONLY must be unset or '1', got 'yes'."
    monkeypatch.setenv("MLA_FP8KV_DEQUANT", "cvt")
    with pytest.raises(ValueError) as refusal:
        jit.get_module(E4M3, 64)
    assert str(refusal.value) == "MLA_FP8KV_DEQUANT must be unset or 'bits', got 'cvt'."


def test_modules_are_loaded_once(jit, monkeypatch):
    made = []

    class Spec:
        name = "module"
        is_aot = True
        plan = run = forget = None

        def build_and_load(self):
            made.append(self)
            return self

    monkeypatch.setattr(jit, "gen_module", lambda *key: Spec())
    jit._load.cache_clear()
    first = jit.get_module(E4M3, 64)
    assert jit.get_module(E4M3, 64) is first
    assert jit.get_module(E5M2, 64) is not first
    assert len(made) == 2
    jit._load.cache_clear()


def test_the_build_file_of_an_earlier_installation_is_replaced(
    jit, flashinfer, monkeypatch, tmp_path
):
    """FlashInfer 0.6 would keep it, with the sources and flags of then."""
    from flashinfer.jit import env as jit_env

    monkeypatch.setattr(jit_env, "FLASHINFER_JIT_DIR", tmp_path)
    spec = jit.gen_module(E4M3, 64)
    spec.ninja_path.parent.mkdir()
    spec.ninja_path.write_text("old\n")
    seen = []

    def build_and_load(self):
        seen.append(self.ninja_path.read_text())
        raise OSError("enough")

    monkeypatch.setattr(type(spec), "build_and_load", build_and_load)
    jit._load.cache_clear()
    with pytest.raises(OSError, match="enough"):
        jit.get_module(E4M3, 64)
    (text,) = seen
    assert all(str(path) in text for path in spec.sources) and "-DMLA_FP8KV_KPE=64" in text


def run_python(code, *path):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(map(str, path)), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, mla_fp8kv; print(*[m for m in ('torch', 'flashinfer') if m in sys.modules])"
    assert run_python(code, PACKAGE.parent) == []


def test_importing_the_hooks_leaves_the_gpu_alone(trees, tmp_path):
    code = (
        f"import os; os.environ['FLASHINFER_WORKSPACE_BASE'] = {str(tmp_path)!r}\n"
        f"import torch, mla_fp8kv.jit, mla_fp8kv.{'flat_wrapper' if FLAT else 'backend'}\n"
        "print(torch.cuda.is_initialized())"
    )
    assert run_python(code, trees.patched, PACKAGE.parent) == ["False"]
