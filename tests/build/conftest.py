"""The invented release as a fixture, with the driver's folders moved to a temporary one."""

import hashlib
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))

from invented import PATCH, write, write_tree  # noqa: E402
from mla_fp8kv_build import pin as pins  # noqa: E402
from mla_fp8kv_build import series  # noqa: E402


@pytest.fixture
def release(tmp_path, monkeypatch):
    """The pin of the invented release; its pristine tree, series and touched.sha256 exist."""
    root = tmp_path / "checkout"
    monkeypatch.setattr(pins, "ROOT", root)
    monkeypatch.setattr(pins, "PINS", root / "third_party" / "flashinfer")
    monkeypatch.setattr(series, "ROOT", root)
    monkeypatch.setenv("MLA_FP8KV_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHINFER_SDIST", raising=False)
    sdist = tmp_path / "flashinfer_python-9.9.9.tar.gz"
    write_tree(tmp_path / "sdist" / "flashinfer_python-9.9.9")
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "sdist" / "flashinfer_python-9.9.9", "flashinfer_python-9.9.9")
    pin = pins.Pin(
        name="flashinfer-python",
        version="9.9.9",
        sdist=sdist.name,
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        licence="Apache-2.0",
        local=1,
    )
    write_tree(pin.pristine)
    write(root / "tests" / "test_it.py", "")
    write(pin.patches / "0001-a-change.patch", PATCH)
    write(pin.patches / "series", "# the order\n0001-a-change.patch\n")
    write(pin.patches / "touched.sha256", series.touched_text(series.result(pin)))
    return pin


@pytest.fixture
def sdist(release, tmp_path):
    """The sdist of the invented release."""
    return tmp_path / release.sdist
