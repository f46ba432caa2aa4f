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


def _download(pin: Pin, kept: Path) -> None:
    files.need_space(kept.parent, 1, "the download")
    with files.scratch_directory(kept.parent / f"download-{pin.version}") as directory:
        wanted = directory / "requirements.txt"
        # With --hash pip itself refuses other bytes before it runs anything of theirs.
        wanted.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
        result = run_pip(
            sys.executable,
            *("download", "--no-deps", "--no-binary", pin.name, "--require-hashes"),
            *("-r", str(wanted), "-d", str(directory)),
        )
        if result.returncode:
            raise BuildError(_sentence(pin, result.stdout))
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
