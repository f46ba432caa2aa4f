"""From the pin to the checked wheel in dist/, with nothing done twice."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from mla_fp8kv_build import aot, check, env, files, overlay, series, site
from mla_fp8kv_build.arch import Arch
from mla_fp8kv_build.env import REQUIREMENTS, UPSTREAM_SWITCHES
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.fetch import fetch
from mla_fp8kv_build.paths import BUILD, DIST, PACKAGE
from mla_fp8kv_build.pin import Pin
from mla_fp8kv_build.steps import Steps
from mla_fp8kv_build.toolchain import Toolkit
from mla_fp8kv_build.unpack import unpack, unpacked

_RUN_BACKEND = (
    "import sys; sys.path.insert(0, '.'); import build_backend; "
    "build_backend.build_wheel(sys.argv[1])"
)


def pristine(pin: Pin, steps: Steps) -> None:
    """The tree with upstream's files, made where it is not there yet."""
    if unpacked(pin):
        return
    with steps.step("fetch") as notes:
        sdist = fetch(pin)
        notes.append(str(sdist))
    with steps.step("unpack") as notes:
        unpack(pin, sdist)
        notes.append(str(pin.pristine))


def prepare(pin: Pin, steps: Steps) -> None:
    """The pristine and the patched tree of the release, made where they are not there yet."""
    pristine(pin, steps)
    with steps.step("patch") as notes:
        notes.append(str(pin.patched) if series.make_patched(pin) else "unchanged")


def build(pin: Pin, steps: Steps) -> Path:
    """Path of the wheel; builds what changed since the last call in this checkout."""
    with files.lock(BUILD / "lock"):
        prepare(pin, steps)
        wheel = DIST / overlay.wheel_name(pin)
        stamp = BUILD / f"wheel-{pin.version}.json"
        # Read once: what is built, checked and stamped is the same even while somebody edits.
        ours = overlay.package_files()
        inputs = _inputs(pin, ours)
        if stamp.is_file() and wheel.is_file():
            known = json.loads(stamp.read_text())
            if known["inputs"] == inputs and known["sha256"] == files.sha256(wheel):
                with steps.step("wheel") as notes:
                    notes.append("unchanged")
                return wheel
        with steps.step("build") as notes:
            upstream, fresh = _upstream_wheel(pin)
            notes.append("upstream's wheel of the patched tree" if fresh else "unchanged")
        with files.new_file(wheel) as partial:
            with steps.step("overlay"):
                overlay.add_package(pin, upstream, ours, partial)
            with steps.step("check"):
                check.check(pin, partial, ours)
        stamp.write_text(json.dumps({"inputs": inputs, "sha256": files.sha256(wheel)}))
    return wheel


def add_modules(pin: Pin, plain: Path, archs: list[Arch], toolkit: Toolkit, steps: Steps) -> Path:
    """Path of a second wheel: `plain` with our modules compiled for `archs`.

    Nothing is compiled on first use then, and it serves these architectures only, since FlashInfer
    takes a module that the package holds without asking for which GPUs it is.
    """
    with steps.step("modules") as notes:
        unpacked_wheel = site.unpacked(pin, plain)
        with files.lock(BUILD / "bundle.lock"):
            python = env.ensure("dev")
            built = aot.build(pin, python, unpacked_wheel, archs, toolkit, shipped_only=True)
        libraries = {aot.place(name): path.read_bytes() for name, path in built.items()}
        notes.append(", ".join(f"sm_{arch.name}" for arch in archs))
    ours = {
        f"{PACKAGE.name}/{path.relative_to(unpacked_wheel / PACKAGE.name).as_posix()}": (
            path.read_bytes()
        )
        for path in files.source_files(unpacked_wheel / PACKAGE.name)
    }
    wheel = DIST / overlay.wheel_name(pin, overlay.NATIVE_TAG)
    with files.new_file(wheel) as partial:
        with steps.step("overlay"):
            overlay.add_modules(pin, plain, libraries, partial)
        with steps.step("check"):
            check.check(pin, partial, {**ours, **libraries})
    return wheel


def _inputs(pin: Pin, ours: dict[str, bytes]) -> str:
    here = Path(__file__).parent
    package = hashlib.sha256()
    for name, data in ours.items():
        package.update(f"{name}\0{len(data)}\0".encode() + data)
    driver = files.sha256_tree(files.source_files(here), here)
    return f"{series.key(pin)}-{driver}-{package.hexdigest()}"


def _upstream_wheel(pin: Pin) -> tuple[Path, bool]:
    """The wheel upstream's build backend makes of the patched tree, and whether it is new."""
    kept = BUILD / f"upstream-{pin.version}"
    key = series.key(pin) + files.sha256(REQUIREMENTS["build"])
    stamp = kept / "key"
    if stamp.is_file() and stamp.read_text() == key:
        return next(kept.glob("*.whl")), False
    files.need_space(BUILD, 2, "building the wheel")
    # The backend writes into its tree, so it gets a copy.
    with files.scratch_directory(BUILD / f"tree-{pin.version}") as tree:
        shutil.copytree(pin.patched, tree, dirs_exist_ok=True)
        with files.new_directory(kept) as directory:
            log = BUILD / f"upstream-{pin.version}.log"
            with log.open("w") as output:
                result = subprocess.run(
                    [sys.executable, "-c", _RUN_BACKEND, str(directory)],
                    cwd=tree,
                    env={**os.environ, **UPSTREAM_SWITCHES},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            if result.returncode:
                last = log.read_text().strip().splitlines()[-1:]
                if last and "No space left on device" in last[0]:
                    raise BuildError(f"Disk full: building the wheel needs 2 GB in {BUILD}.")
                raise BuildError(
                    f"Upstream's build failed with {last[0] if last else 'no message'}; "
                    f"its output is in {log}."
                )
            (directory / "key").write_text(key)
    return next(kept.glob("*.whl")), True
