"""Compiles the kernels with NVRTC, for CUDA releases of which the index has no complete nvcc.

NVRTC is the front end, optimizer and ptxas of its release, for device code only: what the kernels
may use of the language and of PTX is what it takes. Its code is near nvcc's, not the same: 13.0.88
of both give 158 of 182 kernels the same registers, the others up to 9 more or fewer.

Run as a program, because a process compiles one thing at a time and keeps the library it loaded:

    nvrtc.py LIBRARY                          prints the numbers N for which it has sm_N
    nvrtc.py LIBRARY FOLDER ARCH KERNEL ...   prints ptxas's report of these template instances,
                                              which FOLDER/*.cuh have
"""

import ctypes
import sys
from pathlib import Path

# CUDA's own declarations are built in, headers and builtins of the host's compiler are not.
_HEADERS = {
    "cuda_runtime.h": "",
    "cstdint": """#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
""",
}
_BUILTINS = """
#define __builtin_fabsf fabsf
#define __builtin_huge_valf() __builtin_bit_cast(float, 0x7f800000u)
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fffffffu)
"""
# Functions without a mark are the host's for nvcc, and an error here.
_OPTIONS = ["-std=c++17", "-DNDEBUG", "-default-device", "--ptxas-options=-v"]


def load(library: Path) -> ctypes.CDLL:
    """The library; what it looks for by name alone is loaded first, from beside it."""
    for builtins in library.parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def architectures(nvrtc: ctypes.CDLL) -> list[int]:
    """The numbers N for which it has sm_N."""
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(found)
    return list(found)


def compile_program(
    nvrtc: ctypes.CDLL,
    program: str,
    options: list[str],
    headers: dict[str, str] | None = None,
    kernels: list[str] | None = None,
) -> tuple[bool, str]:
    """Whether `program` compiles to machine code, and what the compiler said.

    headers: texts of headers that take the place of files. kernels: template instances to make.
    """
    headers = headers or {}
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(handle),
        program.encode(),
        b"program.cu",
        len(headers),
        _strings(headers.values()),
        _strings(headers),
    )
    for kernel in kernels or []:
        nvrtc.nvrtcAddNameExpression(handle, kernel.encode())
    status = nvrtc.nvrtcCompileProgram(handle, len(options), _strings(options))
    nvrtc.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(handle, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))
    return status == 0, log.value.decode()


def _strings(texts) -> ctypes.Array:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def main(library: str, *arguments: str) -> int:
    """What the program does; its exit status."""
    nvrtc = load(Path(library))
    if not arguments:
        print(*architectures(nvrtc))
        return 0
    folder, arch, *kernels = arguments
    options = [f"-arch=sm_{arch}", f"-I{folder}", *_OPTIONS]
    includes = (f'#include "{path.name}"\n' for path in sorted(Path(folder).glob("*.cuh")))
    program = _BUILTINS + "".join(includes)
    compiled, log = compile_program(nvrtc, program, options, _HEADERS, kernels)
    print(log)
    return int(not compiled)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
