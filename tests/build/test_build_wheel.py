"""The real wheel is a drop-in, and each kind of fault in a wheel is seen."""

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from invented import TREE
from mla_fp8kv_build import aot, check, overlay
from mla_fp8kv_build import pin as pins
from mla_fp8kv_build.errors import BuildError
from packaging.requirements import Requirement

PIN = pins.load(os.environ.get("MLA_FP8KV_BASE", pins.DEFAULT_BASE))
WHEEL = Path(os.environ.get("MLA_FP8KV_WHEEL", "not-built"))
INFO = overlay.dist_info(PIN, PIN.wheel_version)
built = pytest.mark.skipif(not WHEEL.is_file(), reason="./build.sh test sets MLA_FP8KV_WHEEL")


@built
def test_metadata_of_the_wheel():
    with zipfile.ZipFile(WHEEL) as archive:
        metadata = HeaderParser().parsestr(archive.read(f"{INFO}/METADATA").decode())
        entry_points = archive.read(f"{INFO}/entry_points.txt").decode()
    upstream = HeaderParser().parsestr((PIN.pristine / "PKG-INFO").read_text())
    assert metadata["Name"] == "flashinfer-python"
    assert metadata["Version"] == f"{PIN.version}+mlafp8.{PIN.local}"
    # How SGLang asks for it, extras included.
    wanted = Requirement(f"flashinfer_python[cu13]=={PIN.version}")
    assert wanted.specifier.contains(metadata["Version"])
    assert metadata.get_all("Requires-Dist") == upstream.get_all("Requires-Dist")
    assert "[sglang.srt.plugins]\nmla_fp8kv = mla_fp8kv.sglang:activate" in entry_points
    assert "flashinfer = flashinfer.__main__:cli" in entry_points


@built
def test_contents_of_the_wheel():
    with zipfile.ZipFile(WHEEL) as archive:
        names = set(archive.namelist())
        assert check.record_problems(PIN, archive) == []
        ours = {name: archive.read(name) for name in names if name.startswith("mla_fp8kv/")}
        assert check.content_problems(PIN, archive, ours) == []
    for name in (
        "mla_fp8kv/kernel/kernel.cuh",
        "mla_fp8kv/kernel/binding/mla_fp8kv_run.cu",
        "mla_fp8kv/kernel/binding/mla_fp8kv_plan.cu",
        "mla_fp8kv/LICENSE",
        "mla_fp8kv/NOTICE",
        "flashinfer/data/csrc/batch_mla_run.cu",
    ):
        assert name in names
    assert not [name for name in names if "mla_fp8kv_build" in name or name.startswith("tests")]


@built
def test_what_an_import_says():
    program = (
        "import importlib.metadata as m, flashinfer; "
        "points = m.entry_points(group='sglang.srt.plugins', name='mla_fp8kv'); "
        "print(flashinfer.__version__, m.version('flashinfer-python'), [p.value for p in points])"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    expected = f"{PIN.version} {PIN.wheel_version} ['mla_fp8kv.sglang:activate']"
    assert output.strip() == expected


@built
def test_the_wheel_knows_that_it_is_ours():
    program = "from mla_fp8kv import installed; print(installed.flashinfer_is_ours())"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "True\n"


@built
def test_pip_takes_it_for_the_pinned_requirement(tmp_path):
    """pip itself resolves SGLang's requirement to the wheel."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index"),
            *("--target", str(tmp_path), "--find-links", str(WHEEL.parent)),
            f"flashinfer-python=={PIN.version}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"Would install flashinfer-python-{PIN.wheel_version}" in result.stdout, result.stderr


def test_the_environment_has_one_flashinfer():
    found = [
        one.version
        for one in importlib.metadata.distributions()
        if one.metadata["Name"] == "flashinfer-python"
    ]
    assert found in ([PIN.wheel_version], []), found


@pytest.fixture
def base_wheel(release, tmp_path):
    """What upstream's build would make of the invented release, patched."""
    info = overlay.dist_info(release, release.version)
    path = tmp_path / "upstream.whl"
    patched = TREE["flashinfer/mla.py"].replace("line 5\n", "line five\n")
    patched = patched.replace("line 21\n", "line 20 and a half\nline 21\n")
    members = {
        "flashinfer/__init__.py": TREE["flashinfer/__init__.py"],
        "flashinfer/_build_meta.py": TREE["flashinfer/_build_meta.py"],
        "flashinfer/mla.py": patched,
        "flashinfer/other.py": TREE["flashinfer/other.py"],
        "flashinfer/data/csrc/run.cu": TREE["csrc/run.cu"],
        f"{info}/METADATA": TREE["PKG-INFO"],
        f"{info}/entry_points.txt": "[console_scripts]\nflashinfer = flashinfer.__main__:cli\n",
        f"{info}/top_level.txt": "flashinfer\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    write_wheel(path, members)
    return path


def write_wheel(path: Path, members: dict[str, str | bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)


OURS = {"mla_fp8kv/__init__.py": b"", "mla_fp8kv/kernel/kernel.cuh": b"// kernel\n"}


def test_a_sound_wheel_passes_and_is_reproducible(release, base_wheel, tmp_path):
    first, second = tmp_path / "first.whl", tmp_path / "second.whl"
    for path in (first, second):
        overlay.add_package(release, base_wheel, OURS, path)
        check.check(release, path, OURS)
    assert first.read_bytes() == second.read_bytes()


def test_compiled_modules_make_a_wheel_of_the_platform(release, base_wheel, tmp_path):
    plain, native = tmp_path / "plain.whl", tmp_path / "native.whl"
    overlay.add_package(release, base_wheel, OURS, plain)
    libraries = {aot.place("mla_fp8kv_1"): b"\x7fELF"}
    overlay.add_modules(release, plain, libraries, native)
    check.check(release, native, {**OURS, **libraries})
    info = overlay.dist_info(release, release.wheel_version)
    with zipfile.ZipFile(native) as archive:
        assert archive.read("flashinfer/data/aot/mla_fp8kv_1/mla_fp8kv_1.so") == b"\x7fELF"
        tags = archive.read(f"{info}/WHEEL").decode()
    assert "Tag: py3-none-linux_x86_64\n" in tags and "Root-Is-Purelib: false\n" in tags
    assert overlay.wheel_name(release, overlay.NATIVE_TAG).endswith("-py3-none-linux_x86_64.whl")
    with pytest.raises(BuildError, match="neither ours nor upstream's"):
        check.check(release, native, OURS)


def _change(name: str, new: str):
    """A fault put into upstream's wheel: member `name` becomes `new`, or goes when it is None."""

    def apply(members: dict) -> None:
        if new is None:
            del members[name]
        else:
            members[name] = new

    return apply


INVENTED = "flashinfer_python-9.9.9.dist-info"
METADATA = TREE["PKG-INFO"]


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (_change("flashinfer/other.py", "first\n"), "flashinfer/other.py differs from upstream's"),
        (_change("flashinfer/data/csrc/run.cu", ""), "csrc/run.cu differs from upstream's"),
        (_change("flashinfer/mla.py", TREE["flashinfer/mla.py"]), "not as the series leaves it"),
        (_change("flashinfer/mla.py", None), "lacks the patched flashinfer/mla.py"),
        (_change("flashinfer/other.py", None), "lacks upstream's flashinfer/other.py"),
        (_change("flashinfer/new.py", ""), "flashinfer/new.py is neither ours nor upstream's"),
        (
            _change(f"{INVENTED}/METADATA", METADATA + "Requires-Dist: leftpad\n"),
            "its Requires-Dist differs from upstream's",
        ),
        (
            _change(f"{INVENTED}/METADATA", METADATA.replace("9.9.9", "9.9.8")),
            "its version is 9.9.8",
        ),
        (
            _change(f"{INVENTED}/METADATA", METADATA.replace("python\n", "cubin\n")),
            "its name is flashinfer-cubin",
        ),
        (_change(f"{INVENTED}/entry_points.txt", ""), "lacks upstream's console script"),
        (
            _change("flashinfer/_build_meta.py", '__version__ = "9.9.9+mlafp8.1"\n'),
            "flashinfer.__version__ is not 9.9.9",
        ),
    ],
)
def test_faults_of_the_build_are_seen(release, base_wheel, tmp_path, fault, problem):
    with zipfile.ZipFile(base_wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    fault(members)
    write_wheel(base_wheel, members)
    overlay.add_package(release, base_wheel, OURS, tmp_path / "ours.whl")
    with pytest.raises(BuildError, match=problem):
        check.check(release, tmp_path / "ours.whl", OURS)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (_change("mla_fp8kv/kernel/kernel.cuh", None), "it lacks mla_fp8kv/kernel/kernel.cuh"),
        (_change("mla_fp8kv/kernel/kernel.cuh", "//"), "kernel.cuh differs from the checkout"),
        (_change("flashinfer/other.py", "first\n"), "RECORD is wrong about flashinfer/other.py"),
        (_change("flashinfer/added.py", ""), "its RECORD and its members differ"),
        (
            _change(
                "flashinfer_python-9.9.9+mlafp8.1.dist-info/entry_points.txt",
                "[console_scripts]\na = b:c\n",
            ),
            "lacks the entry point group sglang.srt.plugins",
        ),
    ],
)
def test_faults_of_the_overlay_are_seen(release, base_wheel, tmp_path, fault, problem):
    good, bad = tmp_path / "good.whl", tmp_path / "bad.whl"
    overlay.add_package(release, base_wheel, OURS, good)
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    fault(members)
    write_wheel(bad, members)
    with pytest.raises(BuildError, match="The wheel is not as it should be") as error:
        check.check(release, bad, OURS)
    assert problem in str(error.value)
