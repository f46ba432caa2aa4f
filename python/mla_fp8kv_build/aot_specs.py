"""Writes, as JSON, how FlashInfer would compile the MLA modules of a bundle.

Runs in the dev environment with the built wheel importable, FLASHINFER_CUDA_ARCH_LIST naming the
targets and FLASHINFER_WORKSPACE_BASE a folder for generated sources. The modules' names, sources
and flags are those of FlashInfer's own just-in-time build, so its loader takes what is built here
for an ahead-of-time copy.
"""

import json
import os
import shlex
import sys

import torch


def _shipped() -> list:
    from mla_fp8kv.jit import gen_module

    formats = (torch.float8_e4m3fn, torch.float8_e5m2)
    return [gen_module(kv_dtype, kpe) for kv_dtype in formats for kpe in (64, 0)]


def _for_tests() -> list:
    """Ours, chosen by an environment variable only: SM80's conversion, and loads without math."""
    from mla_fp8kv.jit import gen_module

    return [
        gen_module(torch.float8_e4m3fn, 64, bits=True),
        gen_module(torch.float8_e4m3fn, 64, loads=True),
    ]


def _upstreams() -> list:
    from flashinfer.jit import env
    from flashinfer.jit.attention.modules import gen_batch_mla_module

    wanted = [("fa2", torch.bfloat16)]
    if "9.0a" in os.environ["FLASHINFER_CUDA_ARCH_LIST"].split():
        wanted.append(("fa3", torch.bfloat16))
        # FA3 takes FP8 since its run() has scales; before, it does not compile for it.
        if "ckv_scale" in (env.FLASHINFER_CSRC_DIR / "batch_mla_sm90_binding.cu").read_text():
            wanted.append(("fa3", torch.float8_e4m3fn))
    return [
        gen_batch_mla_module(
            backend, torch.bfloat16, kv, torch.bfloat16, torch.int32, 512, 64, False
        )
        for backend, kv in wanted
    ]


def _describe(spec, kind: str) -> dict:
    commands = spec.get_compile_commands()
    # "nvcc -c SOURCE FLAGS... -o OBJECT"; every source of a module has the same flags.
    flags = shlex.split(commands[0]["command"])[3:-2]
    return {
        "name": spec.name,
        "kind": kind,
        "sources": [command["file"] for command in commands],
        "flags": flags,
    }


def main() -> None:
    """Write the list of modules to the file that the first argument names."""
    kinds = {"upstream": _upstreams(), "shipped": _shipped(), "tests": _for_tests()}
    modules = [_describe(spec, kind) for kind, specs in kinds.items() for spec in specs]
    with open(sys.argv[1], "w") as stream:
        json.dump(modules, stream, indent=1)


main()
