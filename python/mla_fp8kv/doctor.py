"""`python -m mla_fp8kv doctor`: one screen that says whether FP8 KV for MLA will work here.

Looks without importing torch, FlashInfer or SGLang, so it also runs, and says what is missing,
where they are broken or absent.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import gpus, installed, sglang_source, storage

GOOD, NOTE, BAD = "ok", "note", "MISSING"
_NEEDED_SHARED_BYTES = 101376  # the largest tile that every supported GPU has to hold
_ALL_TILES_SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class Line:
    """One line of the screen; BAD means that FP8 KV for MLA will not work."""

    name: str
    state: str
    text: str


def lines() -> list[Line]:
    """Everything doctor has to say, in order."""
    checks = (_gpus, _torch, _flashinfer, _prebuilt, _compiler, _cache, _modules, _sglang)
    return [line for check in checks for line in check()]


def main() -> int:
    """Print the screen; 0 when it will work, 1 when not."""
    print(f"mla_fp8kv doctor, Python {platform.python_version()}, {platform.machine()}")
    found = lines()
    for line in found:
        print(f"  {line.name:<11} {line.state:<8} {line.text}")
    missing = [line.name for line in found if line.state == BAD]
    if missing:
        print(f"FP8 KV for MLA will not work here: see {', '.join(dict.fromkeys(missing))}.")
        return 1
    print("FP8 KV for MLA will work here; 'python -m mla_fp8kv verify' checks it on the GPU.")
    return 0


def _gpus() -> Iterator[Line]:
    try:
        driver, devices = gpus.query()
    except gpus.NoDriver as error:
        yield Line("GPU", BAD, str(error))
        return
    if not devices:
        yield Line("GPU", BAD, "The driver finds no device.")
    for index, gpu in enumerate(devices):
        major, minor = gpu.capability
        facts = (
            f"{index}: {gpu.name}, sm_{major}{minor}, {gpu.sms} SMs, {gpu.shared_bytes:,} B "
            "shared memory a block"
        )
        if gpu.capability < (8, 0):
            yield Line("GPU", BAD, f"{facts}; compute capability 8.0 or newer is supported")
        elif gpu.shared_bytes < _NEEDED_SHARED_BYTES:
            yield Line("GPU", BAD, f"{facts}; {_NEEDED_SHARED_BYTES:,} B are needed")
        else:
            rows = 64 if gpu.shared_bytes >= _ALL_TILES_SHARED_BYTES else 32
            yield Line("GPU", GOOD, f"{facts}: tiles of up to {rows} rows")
    yield Line("driver", GOOD, f"CUDA {driver}")


def _torch() -> Iterator[Line]:
    root = installed.package_dir("torch")
    if root is None:
        yield Line("torch", BAD, "not installed")
        return
    version_file = root / "version.py"
    text = version_file.read_text("utf-8") if version_file.is_file() else ""
    cuda = re.search(r"^cuda\b.*?=\s*'([\d.]+)'", text, re.MULTILINE)
    version = installed.version("torch") or "of unknown version"
    if cuda:
        yield Line("torch", GOOD, f"{version}, CUDA {cuda[1]}")
    else:
        yield Line("torch", BAD, f"{version} is a build without CUDA")


def _flashinfer() -> Iterator[Line]:
    root, version = installed.package_dir("flashinfer"), installed.version("flashinfer-python")
    if root is None:
        yield Line("FlashInfer", BAD, "not installed")
    elif installed.flashinfer_is_ours():
        yield Line("FlashInfer", GOOD, f"{version} with FP8 KV for MLA, {root}")
    else:
        yield Line(
            "FlashInfer",
            BAD,
            f"{version} in {root} is not our build; install the wheel over it with "
            "pip install --no-deps --force-reinstall",
        )


def _prebuilt() -> Iterator[Line]:
    """flashinfer-cubin and flashinfer-jit-cache have to match upstream's version, not ours."""
    base = (installed.version("flashinfer-python") or "").partition("+")[0]
    for name in ("flashinfer-cubin", "flashinfer-jit-cache"):
        version = installed.version(name)
        if version is None:
            yield Line(name.removeprefix("flashinfer-"), GOOD, "not installed, not needed")
        else:
            matches = version.partition("+")[0] == base
            yield Line(
                name.removeprefix("flashinfer-"),
                GOOD if matches else NOTE,
                version if matches else f"{version} does not match FlashInfer {base}",
            )


def _compiler() -> Iterator[Line]:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(home) / "bin" / "nvcc" if home else shutil.which("nvcc")
    nvcc = Path(nvcc or "/usr/local/cuda/bin/nvcc")
    if not nvcc.is_file():
        state = NOTE if _module_files() else BAD
        yield Line("nvcc", state, f"{nvcc} not found; modules that are not cached need it")
        return
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Line("nvcc", BAD, f"{nvcc} does not run: {error}")
        return
    release = re.search(r"release (\d+)\.(\d+)", output.stdout)
    if release is None:
        yield Line("nvcc", BAD, f"{nvcc} does not say its release")
    elif (int(release[1]), int(release[2])) < (12, 8):
        yield Line("nvcc", NOTE, f"{release[1]}.{release[2]}, tested is 12.8 and newer, {nvcc}")
    else:
        yield Line("nvcc", GOOD, f"{release[1]}.{release[2]}, {nvcc}")


def _cache_directory() -> Path:
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    return base / ".cache" / "flashinfer"


def _cache() -> Iterator[Line]:
    """Importing FlashInfer already writes there, so even a compiled module does not help."""
    directory = _cache_directory()
    if reason := storage.fault(directory):
        yield Line(
            "cache",
            BAD,
            f"{storage.MEGABYTES} MB cannot be written to {directory} ({reason}); set "
            "FLASHINFER_WORKSPACE_BASE to a directory that has room and can be written",
        )
    else:
        yield Line("cache", GOOD, str(directory))


def _module_files() -> list[Path]:
    """Compiled FP8 MLA modules in FlashInfer's cache and in the ahead-of-time places."""
    places = [_cache_directory()]
    for package, folder in (("flashinfer", "data/aot"), ("flashinfer_jit_cache", "jit_cache")):
        if root := installed.package_dir(package):
            places.append(root / folder)
    return sorted(file for place in places for file in place.rglob("mla_fp8kv_*/*.so"))


def _modules() -> Iterator[Line]:
    files = _module_files()
    if not files:
        yield Line("modules", GOOD, "none compiled yet; the first plan takes tens of seconds")
    for file in files:
        yield Line("modules", GOOD, str(file))


def _sglang() -> Iterator[Line]:
    root, version = installed.package_dir("sglang"), installed.version("sglang")
    if root is None:
        yield Line("SGLang", NOTE, "not installed")
        return
    from . import sglang, sglang_patch

    file = root / sglang_source.FILE
    if not (root / "srt" / "plugins").is_dir():
        if not file.is_file():
            yield Line("SGLang", NOTE, f"{version} has no {sglang_source.FILE}")
        elif sglang_patch.is_applied(version, file):
            yield Line("SGLang", GOOD, f"{version} is patched")
        elif version in sglang_patch.available():
            yield Line("SGLang", NOTE, f"{version}: run 'python -m mla_fp8kv sglang-patch'")
        else:
            yield Line("SGLang", NOTE, f"{version} is not supported")
        return
    reason = _why_no_hook(file)
    if reason:
        yield Line("SGLang", NOTE, f"{version} would keep its cast: {reason}")
    else:
        known = "" if version in sglang.SUPPORTED else ", untested but every expectation holds"
        yield Line("SGLang", GOOD, f"{version} would read FP8 KV as it is{known}")


def _why_no_hook(file: Path) -> str | None:
    """Why SGLang's plug-in loading would not end in an active hook, as far as files tell."""
    from . import sglang

    names = [
        entry.name
        for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")
        if entry.value == "mla_fp8kv.sglang:activate"
    ]
    if not names:
        return "no entry point of ours is installed; is this package run from its wheel?"
    if os.environ.get(sglang.SWITCH) == "0":
        return f"{sglang.SWITCH}=0 turns the plug-in off."
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and names[0] not in [name.strip() for name in allowed.split(",")]:
        return f"SGLANG_PLUGINS={allowed} does not name {names[0]}."
    if not installed.flashinfer_is_ours():
        return "FlashInfer is not our build."
    try:
        sglang.read_source(file)
    except (OSError, sglang_source.Mismatch) as error:
        return str(error)
    return None
