"""What stops FP8 KV in FlashInfer 0.6: its MLA does not compile for it. Ours has nothing of it."""

import re
import subprocess
import sys
from pathlib import Path

import mla_fp8kv
import pytest
import torch
from flashinfer_base import BASE, flat_wrapper_only
from mla_fp8kv_build import pin as pins
from mla_fp8kv_build import toolchain
from mla_fp8kv_build.errors import BuildError

pytestmark = flat_wrapper_only

KERNEL = Path(mla_fp8kv.__file__).resolve().parent / "kernel"
ERROR = re.compile(r"^\S*/(include/flashinfer/\S+)\((\d+)\): error: (.*)$", re.MULTILINE)
OURS = ["-DMLA_FP8KV_E5M2=0", "-DMLA_FP8KV_KPE=64", "-DMLA_FP8KV_DEQUANT_BITS=0"]


@pytest.fixture(scope="module")
def nvcc():
    """Runs nvcc on one source with upstream's include folders."""
    tree = pins.load(BASE).pristine
    if not tree.is_dir():
        pytest.skip(f"./build.sh --base {BASE} unpacks FlashInfer {BASE}")
    try:
        toolkit = toolchain.find()
    except BuildError as error:
        pytest.skip(f"no nvcc: {error}")
    folders = [tree / "include", tree / "csrc", tree / "3rdparty" / "spdlog" / "include"]
    folders.append(tree / "3rdparty" / "cutlass" / "include")
    folders += toolchain.tvm_ffi_includes(Path(sys.executable))

    def run(source, *flags, arch="sm_120a", include=()):
        return subprocess.run(
            [
                *(str(toolkit.nvcc), str(source), "-std=c++17", f"-arch={arch}", *flags),
                *(f"-I{folder}" for folder in (*include, *folders)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def upstreams_module(folder, name):
    """Upstream's run() of an MLA module for e4m3, as its JIT writes it."""
    csrc = pins.load(BASE).pristine / "csrc"
    values = {
        "dtype_q": "nv_bfloat16",
        "dtype_kv": "__nv_fp8_e4m3",
        "dtype_o": "nv_bfloat16",
        "dtype_idx": "int32_t",
        "head_dim_ckv": "512",
        "head_dim_kpe": "64",
    }
    config = (csrc / "batch_mla_config.jinja").read_text()
    for key, value in values.items():
        config = config.replace(f"{{{{ {key} }}}}", value)
    (folder / f"{name}_config.inc").write_text(config)
    source = folder / f"{name}_run.cu"
    source.write_text((csrc / source.name).read_text())
    return source


UPSTREAMS_FLAGS = [f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3")]


def test_fa2_does_not_compile_for_fp8(nvcc, tmp_path):
    source = upstreams_module(tmp_path, "batch_mla")
    result = nvcc(source, "-ptx", "-o", str(tmp_path / "out"), *UPSTREAMS_FLAGS)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    found = [
        (path.replace("attention/../", ""), int(line), text)
        for path, line, text in ERROR.findall(output)
    ]
    assert found == [
        (
            "include/flashinfer/mma.cuh",
            523,
            'static assertion failed with "DType must be 16bit floating data type"',
        ),
        ("include/flashinfer/permuted_smem.cuh", 80, "static assertion failed"),
    ]
    assert "2 errors detected" in output
    # Both are reached from the products of FA2's MLA kernel.
    for part in output.split("error: ")[1:]:
        assert re.search(r"attention/mla\.cuh.*\n.*compute_mla_pv<KTraits>", part), part


def test_fa3_does_not_compile_for_fp8(nvcc, tmp_path):
    """So that a wrapper that was made for FA3, as "auto" is on SM90, loses nothing to ours."""
    source = upstreams_module(tmp_path, "batch_mla_sm90")
    result = nvcc(source, "-ptx", "-o", str(tmp_path / "out"), *UPSTREAMS_FLAGS, arch="sm_90a")
    found = ERROR.findall(result.stdout + result.stderr)
    assert result.returncode != 0 and found
    for path, _, text in found:
        assert path == "include/flashinfer/attention/mla_hopper.cuh"
        assert "WGMMA_ASYNC_SS<DTypeKV" in text and 'has no member "op"' in text


def test_ours_compiles_and_has_nothing_of_it(nvcc, flashinfer):
    """The module that FP8 plans take on this base is made of our files alone."""
    from mla_fp8kv import jit

    for source in jit.gen_module(torch.float8_e4m3fn, 64).sources:
        assert source.is_relative_to(KERNEL)
        headers = nvcc(source, "-M", *OURS, include=[KERNEL]).stdout
        assert "/traits.cuh" in headers and "/include/flashinfer/" not in headers
        result = nvcc(source, "-ptx", "-o", "/dev/null", *OURS, include=[KERNEL])
        assert result.returncode == 0, result.stderr
