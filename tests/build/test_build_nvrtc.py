"""The real NVRTC of CUDA 12.8: what it takes bounds what the kernels may use."""

import subprocess

import pytest
from mla_fp8kv_build import arch, nvrtc, resources, toolchain
from mla_fp8kv_build.paths import PACKAGE

KERNELS = ["mla_fp8kv::merge_kernel<8, false>", "mla_fp8kv::merge_kernel<16, true>"]
PROGRAM = """
__global__ void kernel(float* x) { asm volatile("%s" ::"l"(x)); }
"""
# 32 bytes at once came with PTX 8.8, which is CUDA 12.9.
WIDE_LOAD = "{.reg .b32 r<8>; ld.global.v8.b32 {r0, r1, r2, r3, r4, r5, r6, r7}, [%0];}"
LOAD = "{.reg .b32 r<4>; ld.global.v4.b32 {r0, r1, r2, r3}, [%0];}"


@pytest.fixture(scope="module")
def compiler():
    return toolchain.of_release("12.8")


@pytest.fixture(scope="module")
def library(compiler):
    return nvrtc.load(compiler.library)


def test_the_gpus_it_knows(compiler):
    known = compiler.architectures()
    assert [one.name for one in arch.SUPPORTED if one.name.rstrip("a") not in known] == [
        "103a",
        "121a",
    ]


def test_the_report_has_the_kernels_asked_for(compiler):
    command = [*compiler.command, str(PACKAGE / "kernel"), "90a", *KERNELS]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {entry.kernel for entry in resources.parse_report(output)} == set(KERNELS)


def test_a_kernel_that_is_not_there_fails(compiler):
    command = [*compiler.command, str(PACKAGE / "kernel"), "90a", "mla_fp8kv::other_kernel<8>"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "error" in result.stdout


def test_ptx_of_a_later_release_is_refused(library):
    assert nvrtc.compile_program(library, PROGRAM % LOAD, ["-arch=sm_100a"])[0]
    compiled, log = nvrtc.compile_program(library, PROGRAM % WIDE_LOAD, ["-arch=sm_100a"])
    assert not compiled and "Illegal vector size: 8" in log
