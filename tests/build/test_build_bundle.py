"""The slim package of a bundle can stand alone, and the archive is what it says."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from mla_fp8kv_build import aot, assumptions, bundle
from mla_fp8kv_build import pin as pins

SITE = Path(os.environ.get("PYTHONPATH", "").split(os.pathsep)[0])
built = pytest.mark.skipif(
    not (SITE / "mla_fp8kv").is_dir() or "MLA_FP8KV_WHEEL" not in os.environ,
    reason="./build.sh test makes the unpacked wheel",
)


@built
def test_the_slim_package_imports_alone(tmp_path):
    pin = pins.load(os.environ["MLA_FP8KV_BASE"])
    names = bundle.slim_files(pin, Path(sys.executable), SITE)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SITE / name, tmp_path / name)
    (hook,) = assumptions.hooks(pin.patches)
    program = (
        f"import flashinfer, mla_fp8kv, mla_fp8kv.{hook}\n"
        "from flashinfer.mla import BatchMLAPagedAttentionWrapper\n"
        "from flashinfer.jit import env\n"
        "print(flashinfer.__file__, env.FLASHINFER_AOT_DIR)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    package = tmp_path / "flashinfer"
    assert result.stdout.split() == [str(package / "__init__.py"), str(package / "data" / "aot")]
    size = sum((tmp_path / name).stat().st_size for name in names)
    assert size < 80e6, "the slim package has grown"


def test_archives_are_reproducible_and_have_one_top_folder(tmp_path):
    top = tmp_path / "work" / "bundle"
    (top / "site").mkdir(parents=True)
    (top / "site" / "module.py").write_text("x = 1\n")
    archives = []
    for name in ("first", "second"):
        (top / "site" / "module.py").touch()
        bundle._archive(top, tmp_path / name)
        archives.append((tmp_path / name).read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "first") as archive:
        assert archive.getnames() == ["bundle", "bundle/site", "bundle/site/module.py"]


def test_flags_survive_cmake():
    """target_compile_options drops a repeated word, which would take apart -isystem pairs."""
    flags = ["-O3", "-isystem", "/a", "-isystem", "/b", "-DX=1"]
    assert aot._cmake_flags(flags) == [
        "SHELL:-O3",
        "SHELL:-isystem /a",
        "SHELL:-isystem /b",
        "SHELL:-DX=1",
    ]
