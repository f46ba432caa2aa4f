"""Files of released SGLang wheels, which are downloaded once and not installed."""

import subprocess
import sys
import zipfile

import pytest
from mla_fp8kv_build.paths import cache
from released_backend import BACKEND


def backend_file(version: str) -> bytes:
    """The FlashInfer MLA backend of a release; skips the test where there is no package index."""
    folder = cache() / "downloads" / "sglang" / version
    if not list(folder.glob("*.whl")):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"),
                *("--only-binary=:all:", "--dest", str(folder), f"sglang=={version}"),
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"sglang {version} cannot be downloaded: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(BACKEND)
