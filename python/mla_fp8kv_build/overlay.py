"""Adds our package to the wheel that upstream's own build makes.

Nothing of upstream's packaging is patched: their build runs as it is on the patched tree, and the
finished wheel gains the folder `mla_fp8kv`, its entry point and our version. So there is no
packaging patch to rebase, and the dependencies are upstream's by construction. (Upstream's own
FLASHINFER_LOCAL_VERSION is ignored by an sdist build, because `_build_meta.py` exists; that file
also stays as it is, so that `flashinfer.__version__` matches flashinfer-cubin and
flashinfer-jit-cache.)
"""

import base64
import hashlib
import itertools
import zipfile
from collections.abc import Callable
from pathlib import Path

from mla_fp8kv_build import files
from mla_fp8kv_build.paths import PACKAGE, ROOT
from mla_fp8kv_build.pin import Pin

ENTRY_POINTS = "[sglang.srt.plugins]\nmla_fp8kv = mla_fp8kv.sglang:activate\n"
PURE_TAG = "py3-none-any"
# With compiled modules in it. They use neither Python's nor torch's ABI, but the platform's.
NATIVE_TAG = "py3-none-linux_x86_64"
# The date of every archive member, so that the same input gives the same bytes.
_DATE = (2020, 1, 1, 0, 0, 0)


def package_files() -> dict[str, bytes]:
    """Name in the wheel -> bytes, for everything of ours that ships."""
    paths = {
        f"{PACKAGE.name}/{path.relative_to(PACKAGE).as_posix()}": path
        for path in files.source_files(PACKAGE)
    }
    # What `python -m mla_fp8kv sglang-patch` applies.
    for path in sorted((ROOT / "patches" / "sglang").glob("*/*.patch")):
        paths[f"{PACKAGE.name}/{path.relative_to(ROOT).as_posix()}"] = path
    paths[f"{PACKAGE.name}/LICENSE"] = ROOT / "LICENSE"
    paths[f"{PACKAGE.name}/NOTICE"] = ROOT / "NOTICE"
    return {name: path.read_bytes() for name, path in sorted(paths.items())}


def wheel_name(pin: Pin, tag: str = PURE_TAG) -> str:
    """File name of the wheel."""
    return f"{pin.name.replace('-', '_')}-{pin.wheel_version}-{tag}.whl"


def dist_info(pin: Pin, version: str) -> str:
    """Name of the metadata folder in a wheel of the given version."""
    return f"{pin.name.replace('-', '_')}-{version}.dist-info"


def add_package(pin: Pin, upstream: Path, ours: dict[str, bytes], target: Path) -> None:
    """Write `target`: the members of the wheel `upstream`, `ours`, and metadata that says so."""
    old, new = dist_info(pin, pin.version), dist_info(pin, pin.wheel_version)

    def change(name: str, data: bytes) -> tuple[str, bytes]:
        if not name.startswith(f"{old}/"):
            return name, data
        name = name.removeprefix(f"{old}/")
        if name == "METADATA":
            version = f"Version: {pin.wheel_version}\n"
            data = data.replace(f"Version: {pin.version}\n".encode(), version.encode(), 1)
        elif name == "entry_points.txt":
            data = data.rstrip() + b"\n\n" + ENTRY_POINTS.encode()
        elif name == "top_level.txt":
            data += f"{PACKAGE.name}\n".encode()
        return f"{new}/{name}", data

    _rewrite(upstream, change, ours, new, target)


def add_modules(pin: Pin, wheel: Path, libraries: dict[str, bytes], target: Path) -> None:
    """Write `target`: our wheel with compiled modules (name in the wheel -> bytes) added."""
    info = dist_info(pin, pin.wheel_version)

    def change(name: str, data: bytes) -> tuple[str, bytes]:
        if name == f"{info}/WHEEL":
            data = data.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
            data = data.replace(PURE_TAG.encode(), NATIVE_TAG.encode())
        return name, data

    _rewrite(wheel, change, libraries, info, target)


def _rewrite(
    wheel: Path,
    change: Callable[[str, bytes], tuple[str, bytes]],
    added: dict[str, bytes],
    info: str,
    target: Path,
) -> None:
    """Write `target`: each member of `wheel` after `change`, then `added`, then a new RECORD."""
    record = []
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive,
    ):
        kept = [name for name in sorted(source.namelist()) if not name.endswith(("/", "/RECORD"))]
        changed = (change(name, source.read(name)) for name in kept)
        for name, data in itertools.chain(changed, added.items()):
            _write(archive, name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        record.append(f"{info}/RECORD,,\n")
        _write(archive, f"{info}/RECORD", "".join(record).encode())


def _write(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    member = zipfile.ZipInfo(name, _DATE)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = 0o100644 << 16
    archive.writestr(member, data)
