"""Compiles MLA modules ahead of time with cmake and ninja, each once for the same input."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

from mla_fp8kv_build import files, series
from mla_fp8kv_build.arch import Arch
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import BUILD, cache
from mla_fp8kv_build.pin import Pin
from mla_fp8kv_build.toolchain import Toolkit

_HERE = Path(__file__).parent


def build(
    pin: Pin, python: Path, site: Path, archs: list[Arch], toolkit: Toolkit, *, shipped_only: bool
) -> dict[str, Path]:
    """Module name -> shared library.

    Either the modules that a wheel ships or, beside them, those that tests and benchmarks want:
    other forms of ours, and upstream's MLA modules to compare with.
    python: the interpreter of the dev environment. site: the unpacked wheel.
    """
    work = BUILD / f"aot-{pin.version}"
    work.mkdir(parents=True, exist_ok=True)
    modules = [
        module
        for module in _specs(python, site, archs, toolkit, work)
        if module["kind"] == "shipped" or not shipped_only
    ]
    libraries = {
        module["name"]: cache() / "aot" / f"{module['name']}-{_key(pin, site, module, toolkit)}.so"
        for module in modules
    }
    missing = [module for module in modules if not libraries[module["name"]].is_file()]
    if missing:
        files.need_space(work, 1, "compiling the modules")
        built = {module["name"]: work / "modules" / f"{module['name']}.so" for module in missing}
        for path in built.values():
            path.unlink(missing_ok=True)
        try:
            _compile(python, missing, toolkit, work)
        finally:
            # Minutes went into each, so those that were built stay when another one fails.
            for name, path in built.items():
                if path.is_file():
                    with files.new_file(libraries[name]) as partial:
                        shutil.copyfile(path, partial)
    return libraries


def place(name: str) -> str:
    """Where FlashInfer's loader looks for a module, relative to the folder of the packages."""
    return f"flashinfer/data/aot/{name}/{name}.so"


def _specs(python: Path, site: Path, archs: list[Arch], toolkit: Toolkit, work: Path) -> list[dict]:
    listed = work / "modules.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "CUDA_HOME": str(toolkit.home),
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(arch.flashinfer for arch in archs),
        "FLASHINFER_WORKSPACE_BASE": str(work),
    }
    _run([str(python), str(_HERE / "aot_specs.py"), str(listed)], work, "specs", environment)
    return json.loads(listed.read_text())


def _key(pin: Pin, site: Path, module: dict, toolkit: Toolkit) -> str:
    """Changes with whatever can change the library: sources, headers, flags, compiler."""
    # Upstream's headers are fixed by the pin and the series, ours are hashed. Folders of this
    # checkout are left out, so that another checkout finds the same library.
    flags = [flag.replace(str(site), "").replace(str(BUILD), "") for flag in module["flags"]]
    parts = [pin.sha256, series.key(pin), toolkit.version, *flags]
    if module["kind"] != "upstream":
        kernel = site / "mla_fp8kv" / "kernel"
        parts.append(files.sha256_tree(files.source_files(kernel), kernel))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(python: Path, modules: list[dict], toolkit: Toolkit, work: Path) -> None:
    lines = []
    for module in modules:
        lines.append(
            f"aot_module({module['name']}\n  SOURCES {_quoted(module['sources'])}\n"
            f"  FLAGS {_quoted(_cmake_flags(module['flags']))})\n"
        )
    (work / "modules.cmake").write_text("".join(lines))
    tools = python.parent
    cudart = sorted(toolkit.libraries.glob("libcudart.so.*"))
    if not cudart:
        raise BuildError(f"The CUDA toolkit in {toolkit.home} has no libcudart.so.")
    _run(
        [
            *(str(tools / "cmake"), "-G", "Ninja", "-S", str(_HERE), "-B", str(work)),
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
            f"-DCMAKE_CUDA_COMPILER={toolkit.nvcc}",
            "-DCMAKE_CUDA_ARCHITECTURES=OFF",
            f"-DCUDART={cudart[0]}",
        ],
        work,
        "cmake",
    )
    names = [module["name"] for module in modules]
    _run([str(tools / "ninja"), "-C", str(work), "-k", "0", *names], work, "ninja")


def _cmake_flags(flags: list[str]) -> list[str]:
    """Flags for target_compile_options, which drops repeated words unless they are one SHELL: item.

    FlashInfer's flags come as words; `-isystem` is the one that takes the next word as its value.
    """
    joined: list[str] = []
    words = iter(flags)
    for word in words:
        joined.append(f"SHELL:{word} {next(words)}" if word == "-isystem" else f"SHELL:{word}")
    return joined


def _quoted(words: list[str]) -> str:
    return " ".join(f'"{word}"' for word in words)


def _run(command: list[str], work: Path, name: str, environment: dict | None = None) -> None:
    """Run a command with its output in a log, which the sentence of a failure names."""
    log = work / f"{name}.log"
    with log.open("w") as output:
        result = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False
        )
    if result.returncode:
        errors = [line for line in log.read_text().splitlines() if "rror" in line]
        first = errors[0].strip() if errors else f"exit status {result.returncode}"
        raise BuildError(f"Compiling the modules failed in {name}: {first} (log: {log}).")
