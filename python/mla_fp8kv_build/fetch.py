"""Gets the pinned sdist: FLASHINFER_SDIST, the cache, or the configured package index."""

import os
import re
import sys
from pathlib import Path

from mla_fp8kv_build import files
from mla_fp8kv_build.env import pip_error, run_pip
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import cache
from mla_fp8kv_build.pin import Pin
from mla_fp8kv_build.verify import verify


def fetch(pin: Pin) -> Path:
    """Path of the verified sdist; only the first call of a machine needs a network."""
    given = os.environ.get("FLASHINFER_SDIST")
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise BuildError(f"FLASHINFER_SDIST names {given}, which is not a file.")
        verify(path, pin)
        return path
    kept = cache() / "downloads" / pin.sdist
    with files.lock(kept.with_suffix(".lock")):
        if not (kept.is_file() and files.sha256(kept) == pin.sha256):
            _download(pin, kept)
    return kept


def fetch_unpinned(name: str, version: str) -> tuple[Path, str]:
    """(path, SHA-256) of a release that has no pin yet: FLASHINFER_SDIST or the index."""
    unknown = Pin(name, version, f"{name.replace('-', '_')}-{version}.tar.gz", "", "", 0)
    given = os.environ.get("FLASHINFER_SDIST")
    path = Path(given).expanduser() if given else cache() / "downloads" / unknown.sdist
    if given and path.name != unknown.sdist:
        raise BuildError(f"FLASHINFER_SDIST names {given}, which is not {unknown.sdist}.")
    with files.lock(cache() / "downloads" / f"{version}.lock"):
        if not path.is_file():
            _download(unknown, path)
    return path, files.sha256(path)


def _download(pin: Pin, kept: Path) -> None:
    files.need_space(kept.parent, 1, "the download")
    with files.scratch_directory(kept.parent / f"download-{pin.version}") as directory:
        wanted = directory / "requirements.txt"
        # With --hash pip itself refuses other bytes before it runs anything of theirs.
        pinned = f" --hash=sha256:{pin.sha256}" if pin.sha256 else ""
        wanted.write_text(f"{pin.name}=={pin.version}{pinned}\n")
        result = run_pip(
            sys.executable,
            *("download", "--no-deps", "--no-binary", pin.name),
            *("-r", str(wanted), "-d", str(directory)),
        )
        if result.returncode:
            raise BuildError(_sentence(pin, result.stdout))
        if pin.sha256:
            verify(directory / pin.sdist, pin)
        (directory / pin.sdist).replace(kept)


def _sentence(pin: Pin, output: str) -> str:
    if "DO NOT MATCH THE HASHES" in output:
        got = re.search(r"Got\s+([0-9a-f]{64})", output)
        found = got.group(1) if got else "another"
        return f"The hash of {pin.sdist} differs: pinned is {pin.sha256}, found is {found}."
    return (
        f"No network and no local sdist: {pin.name}=={pin.version} could not be fetched from the "
        f"package index ({pip_error(output)}); set FLASHINFER_SDIST to a copy of {pin.sdist}."
    )
