"""Makes the offline bundle: a slim package, compiled modules, GPU tests and the benchmark.

The package in it is the wheel's, less what MLA does not load: of FlashInfer's Python files those
that `import flashinfer` loads plus all of its `mla` and `jit` packages; of its CUDA sources the
headers and the MLA bindings, so that an MLA module that was not compiled ahead can still be
compiled where there is an nvcc.
"""

import gzip
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from mla_fp8kv_build import aot, files
from mla_fp8kv_build.arch import Arch
from mla_fp8kv_build.env import pip_error, run_pip
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import BUILD, ROOT, cache
from mla_fp8kv_build.pin import Pin
from mla_fp8kv_build.steps import Steps
from mla_fp8kv_build.toolchain import Toolkit

MAX_BYTES = 40_000_000
_REQUIREMENTS = ROOT / "requirements-bundle.txt"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_WHOLE = ("flashinfer/mla", "flashinfer/jit", "mla_fp8kv")
_DATA = (
    *("include/**/*", "cccl/**/*", "spdlog/**/*"),
    *("csrc/batch_mla*", "csrc/tvm_ffi_utils.h", "csrc/page*", "csrc/cascade*"),
)
_LOADED = (
    "import sys, flashinfer, flashinfer.mla, mla_fp8kv\n"
    "for module in list(sys.modules.values()):\n"
    "    print(getattr(module, '__file__', None) or '')\n"
)


def bundle(
    pin: Pin,
    python: Path,
    site: Path,
    archs: list[Arch],
    toolkit: Toolkit,
    python_version: str,
    target: Path,
    steps: Steps,
) -> None:
    """Write the bundle to `target` (tar.gz) for servers with Python `python_version`.

    python: the interpreter of the dev environment. site: the unpacked wheel.
    """
    with steps.step("modules") as notes:
        libraries = aot.build(pin, python, site, archs, toolkit, shipped_only=False)
        notes.append(f"{len(libraries)} with nvcc {toolkit.version}")
    with steps.step("wheels"):
        wheels = _wheels(python, python_version)
    with steps.step("package"), files.scratch_directory(BUILD / "bundle") as scratch:
        top = scratch / target.name.removesuffix(".tar.gz")
        shutil.copytree(wheels, top / "site", ignore=shutil.ignore_patterns("bin"))
        for path in slim_files(pin, python, site):
            copy = top / "site" / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(site / path, copy)
        for name, library in libraries.items():
            copy = top / "site" / aot.place(name)
            copy.parent.mkdir(parents=True)
            shutil.copyfile(library, copy)
        _copy_tests(top)
        readme = (Path(__file__).parent / "bundle_readme.md").read_text()
        names = ", ".join(f"sm_{arch.name}" for arch in archs)
        (top / "README.md").write_text(
            readme.format(version=pin.wheel_version, archs=names, python=python_version)
        )
        (top / "COMMIT").write_text(_commit() + "\n")
        with files.new_file(target) as partial:
            _archive(top, partial)
            size = partial.stat().st_size
            if size > MAX_BYTES:
                raise BuildError(
                    f"The bundle is {size} bytes, more than {MAX_BYTES}; give fewer architectures."
                )


def slim_files(pin: Pin, python: Path, site: Path) -> list[str]:
    """Paths, relative to `site`, of the package files that MLA needs."""
    result = subprocess.run(
        [str(python), "-c", _LOADED],
        env={
            **os.environ,
            "PYTHONPATH": str(site),
            "FLASHINFER_WORKSPACE_BASE": str(BUILD / f"aot-{pin.version}"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:]
        raise BuildError(
            f"The built package cannot be imported: {last[0] if last else 'no reason'}."
        )
    loaded = {Path(line) for line in result.stdout.splitlines() if line.startswith(f"{site}/")}
    for folder in _WHOLE:
        loaded |= set(files.source_files(site / folder))
    for pattern in _DATA:
        loaded |= {path for path in (site / "flashinfer" / "data").glob(pattern) if path.is_file()}
    loaded |= {path for path in site.glob("*.dist-info/*") if path.is_file()}
    return sorted(path.relative_to(site).as_posix() for path in loaded)


def _wheels(python: Path, python_version: str) -> Path:
    """A folder with the contents of the wheels in requirements-bundle.txt, kept in the cache."""
    key = files.sha256(_REQUIREMENTS)[:12]
    directory = cache() / "bundle" / f"py{python_version}-{key}"
    with files.lock(directory.with_suffix(".lock")):
        if not directory.is_dir():
            with files.new_directory(directory) as fresh:
                platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
                result = run_pip(
                    python,
                    *("install", "--no-deps", "--only-binary=:all:", "--no-compile"),
                    *("--python-version", python_version, "--implementation", "cp", *platforms),
                    *("--target", str(fresh), "-r", str(_REQUIREMENTS)),
                )
                if result.returncode:
                    raise BuildError(
                        f"The packages for Python {python_version} could not be fetched: "
                        f"{pip_error(result.stdout)}."
                    )
    return directory


def _copy_tests(top: Path) -> None:
    for name in ("tests", "bench", "pyproject.toml", "LICENSE", "NOTICE"):
        source = ROOT / name
        if source.is_dir():
            for path in files.source_files(source):
                copy = top / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        elif source.is_file():
            shutil.copyfile(source, top / name)


def _commit() -> str:
    """The checkout's commit, with -dirty when it differs from it; what the benchmark reports."""
    result = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"


def _archive(top: Path, target: Path) -> None:
    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = 0
        return member

    # mtime=0 and sorted members: the same content gives the same bytes.
    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        archive.add(top, arcname=top.name, filter=plain)
