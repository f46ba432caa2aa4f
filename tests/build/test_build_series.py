"""The patched tree and the rules of a series, on an invented release and on the real ones."""

import shutil
import subprocess

import pytest
from invented import PATCH, TREE, write
from mla_fp8kv_build import pin as pins
from mla_fp8kv_build import series
from mla_fp8kv_build.errors import BuildError

NAME = "0001-a-change.patch"


@pytest.mark.parametrize("version", pins.supported())
def test_the_real_series_is_clean(version):
    assert series.lint(pins.load(version)) == []


@pytest.mark.parametrize("version", pins.supported())
def test_the_real_series_applies_with_git_too(version, tmp_path):
    pin = pins.load(version)
    for path in series.expected(pin):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(pin.pristine / path, tmp_path / path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for line in (pin.patches / "series").read_text().split():
        subprocess.run(["git", "apply", str(pin.patches / line)], cwd=tmp_path, check=True)
    result = series.result(pin)
    assert {path: (tmp_path / path).read_text() for path in result} == result


def test_make_patched_changes_what_the_series_says_and_nothing_else(release):
    assert series.make_patched(release)
    for name, text in TREE.items():
        same = (release.patched / name).read_text() == text
        assert same == (name != "flashinfer/mla.py"), name
    assert "line five" in (release.patched / "flashinfer/mla.py").read_text()
    assert (release.pristine / "flashinfer/mla.py").read_text() == TREE["flashinfer/mla.py"]


def test_make_patched_keeps_a_tree_that_is_up_to_date(release):
    assert series.make_patched(release)
    assert not series.make_patched(release)


def test_make_patched_follows_the_series(release):
    series.make_patched(release)
    write(release.patches / NAME, PATCH.replace("line five", "line FIVE"))
    series.refresh(release)
    assert series.make_patched(release)
    assert "line FIVE" in (release.patched / "flashinfer/mla.py").read_text()


def test_the_tree_must_have_the_recorded_hashes(release):
    write(release.patches / NAME, PATCH.replace("line five", "line FIVE"))
    with pytest.raises(BuildError, match="not as expected: flashinfer/mla.py has another hash"):
        series.make_patched(release)
    assert not release.patched.exists()


def test_a_patch_that_does_not_apply_leaves_nothing(release):
    write(release.patches / NAME, PATCH.replace("line 8", "line eight"))
    with pytest.raises(BuildError, match=f"Patch {NAME} hunk 1 does not apply"):
        series.make_patched(release)
    assert [path.name for path in release.patched.parent.iterdir()] == [release.pristine.name]


def test_the_list_of_touched_files_must_be_complete(release):
    write(release.patches / "touched.sha256", "")
    with pytest.raises(BuildError, match="do not agree about flashinfer/mla.py"):
        series.make_patched(release)


def test_an_edited_tree_is_not_overwritten(release):
    series.make_patched(release)
    write(release.patched / "flashinfer/mla.py", "edited\n")
    write(release.patches / NAME, PATCH + "\n")
    with pytest.raises(BuildError, match="flashinfer/mla.py was edited"):
        series.make_patched(release)
    assert (release.patched / "flashinfer/mla.py").read_text() == "edited\n"


def test_refresh_takes_edits_into_the_patch(release):
    series.make_patched(release)
    mla = release.patched / "flashinfer/mla.py"
    mla.write_text(mla.read_text().replace("line 30", "line thirty"))
    write(release.patched / "flashinfer/other.py", "first\n2\nthird\n")
    assert series.refresh(release) == [NAME, "touched.sha256"]
    text = (release.patches / NAME).read_text()
    assert "+line thirty\n" in text and "+2\n" in text and "+line five\n" in text
    assert series.lint(release) == []
    assert not series.make_patched(release), "the edited tree is what the series now makes"
    assert series.refresh(release) == []


def test_refresh_refuses_an_edit_that_a_later_patch_would_see(release):
    later = PATCH[: PATCH.index("@@ -18")].replace("-line 5", "-line five")
    write(release.patches / "0002-later.patch", later.replace("+line five", "+line V"))
    write(release.patches / "series", f"{NAME}\n0002-later.patch\n")
    series.refresh(release)
    series.make_patched(release)
    write(release.patched / "flashinfer/mla.py", "edited\n")
    with pytest.raises(BuildError, match="is changed by 0002-later.patch after 0001"):
        series.refresh(release, NAME)
    with pytest.raises(BuildError, match="no patch 0003.patch"):
        series.refresh(release, "0003.patch")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("Dropped-when: never\n", ""), "has no Dropped-when field"),
        (("Forwarded: no\n", "Forwarded:\n"), "has no Forwarded field"),
        (("Forwarded: no\n", "Forwarded: no\nMood: good\n"), "has an unknown field Mood"),
        (("9.9.9", "9.9.8"), "does not say Applies-to: flashinfer-python 9.9.9"),
        (("tests/test_it.py", "tests/test_other.py"), "names the test tests/test_other.py"),
        (("@@ -2,7 +2,7 @@ line 1", "@@ -2,7 +2,7 @@"), "not as it would be exported"),
    ],
)
def test_lint_names_what_is_wrong(release, change, problem):
    write(release.patches / NAME, PATCH.replace(*change))
    assert any(problem in line for line in series.lint(release)), series.lint(release)


def test_lint_finds_unused_and_repeated_patches(release):
    write(release.patches / "0002-unused.patch", PATCH)
    assert any("0002-unused.patch is in" in line for line in series.lint(release))
    write(release.patches / "touched.sha256", "0  flashinfer/mla.py\n")
    assert "touched.sha256 is not as it would be exported." in series.lint(release)


def test_a_series_that_names_a_missing_patch(release):
    write(release.patches / "series", "0009-missing.patch\n")
    with pytest.raises(BuildError, match="names 0009-missing.patch"):
        series.lint(release)
