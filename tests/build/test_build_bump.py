"""`bump` carries a series to another release and says what it found, on invented trees."""

import dataclasses
import tarfile

import pytest
from invented import PATCH, TREE, write, write_tree
from mla_fp8kv_build import assumptions, bump, patch, series
from mla_fp8kv_build import pin as pins
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import PACKAGE

NAME = "0001-a-change.patch"
LATER = "0002-later.patch"
MLA = "flashinfer/mla.py"


@pytest.fixture
def newer(release):
    """Release 9.9.10, which is like 9.9.9 until a test changes its tree."""
    new = dataclasses.replace(release, version="9.9.10", sdist="flashinfer_python-9.9.10.tar.gz")
    write_tree(new.pristine)
    return new


def change(pin, old: str, text: str) -> None:
    path = pin.pristine / MLA
    assert old in path.read_text()
    write(path, path.read_text().replace(old, text))


def add_later_patch(release) -> None:
    text = PATCH[: PATCH.index("@@ -18")].replace("-line 5", "-line five")
    write(release.patches / LATER, text.replace("+line five", "+line V"))
    write(release.patches / "series", f"{NAME}\n{LATER}\n")
    series.refresh(release)


def states(outcomes) -> dict:
    return {outcome.name: outcome.states for outcome in outcomes}


def test_nothing_changed(release, newer):
    outcomes, conflicts = bump.carry_over(release, newer)
    assert states(outcomes) == {NAME: {MLA: "applied"}} and conflicts == {}
    text = (newer.patches / NAME).read_text()
    assert text == PATCH.replace("flashinfer-python 9.9.9", "flashinfer-python 9.9.10")
    assert series.lint(newer) == []
    assert series.make_patched(newer)


def test_the_place_moved(release, newer):
    change(newer, "line 1\n", "line 0\nline 1\n")
    add_later_patch(release)
    outcomes, conflicts = bump.carry_over(release, newer)
    assert states(outcomes) == {NAME: {MLA: "merged"}, LATER: {MLA: "merged"}}
    assert conflicts == {} and series.lint(newer) == []
    assert series.result(newer)[MLA].startswith("line 0\nline 1\n")
    assert "line V\n" in series.result(newer)[MLA]


def test_upstream_has_the_change(release, newer):
    change(newer, "line 5\n", "line five\n")
    change(newer, "line 21\n", "line 20 and a half\nline 21\n")
    outcomes, _ = bump.carry_over(release, newer)
    assert states(outcomes) == {NAME: {MLA: "upstream has it"}}
    assert series.lint(newer) == [f"Patch {NAME} changes nothing."]


def test_a_conflict_is_left_to_be_resolved(release, newer):
    change(newer, "line 5\n", "line cinq\n")
    add_later_patch(release)
    outcomes, conflicts = bump.carry_over(release, newer)
    assert states(outcomes) == {NAME: {MLA: "conflict"}, LATER: {MLA: "waits"}}
    assert "<<<<<<< FlashInfer 9.9.10\nline cinq\n" in conflicts[MLA]
    assert f"line five\n>>>>>>> {NAME}\n" in conflicts[MLA]

    # What a person does next.
    series.make_patched(newer)
    write(newer.patched / MLA, conflicts[MLA])
    with pytest.raises(BuildError, match=f"{MLA} in .* still has conflict markers"):
        series.refresh(newer, NAME)
    write(newer.patched / MLA, (newer.pristine / MLA).read_text().replace("cinq", "five"))
    assert series.refresh(newer, NAME) == [NAME, "touched.sha256"]
    assert series.result(newer)[MLA] == (newer.patched / MLA).read_text()


def test_a_file_that_is_gone(release, newer):
    (newer.pristine / MLA).unlink()
    outcomes, conflicts = bump.carry_over(release, newer)
    assert states(outcomes) == {NAME: {MLA: "file is gone"}} and conflicts == {}


def test_an_existing_series_is_not_overwritten(release, newer, monkeypatch):
    write(newer.patches / "series", "")
    monkeypatch.setattr(bump, "pin_release", lambda *_: newer)
    with pytest.raises(BuildError, match="patches/9.9.10 exists"):
        bump.bump(release, "9.9.10")


def test_the_whole_command(release, sdist, tmp_path, monkeypatch):
    """From an sdist without a pin to a patched tree and a report."""
    monkeypatch.setattr(bump, "BUILD", tmp_path / "build")
    monkeypatch.setattr(bump, "PACKAGE", tmp_path / "no-package")
    stem = "flashinfer_python-9.9.10"
    newer = sdist.with_name(f"{stem}.tar.gz")
    write_tree(tmp_path / stem)
    write(tmp_path / stem / MLA, TREE[MLA].replace("line 5\n", "line cinq\n"))
    with tarfile.open(newer, "w:gz") as archive:
        archive.add(tmp_path / stem, stem)
    monkeypatch.setenv("FLASHINFER_SDIST", str(newer))
    report = bump.bump(release, "9.9.10")
    assert f"conflict        {NAME}  {MLA}" in report
    assert f"{MLA}: +1 -1 lines" in report
    assert "1 patched files to resolve" in report
    pin = pins.load("9.9.10")
    assert "<<<<<<< " in (pin.patched / MLA).read_text()
    assert (tmp_path / "build" / "bump-9.9.10" / "flashinfer_mla.py.diff").is_file()
    assert (tmp_path / "build" / "bump-9.9.10" / "report.txt").read_text() == report + "\n"


@pytest.mark.parametrize("version", pins.supported())
def test_every_assumption_holds_on_the_release_it_was_written_for(version):
    pin = pins.load(version)
    if not pin.pristine.is_dir():
        pytest.skip(f"./build.sh --base {version} unpacks FlashInfer {version}")
    hooked = assumptions.hooks(pin.patches)
    findings = assumptions.compare(pin.pristine, pin.pristine, PACKAGE, hooked)
    assert [one for one in findings if one.state != "holds"] == []
    sources = [*assumptions.SOURCES]
    for hook in hooked:
        sources += assumptions.SOURCES_OF_HOOK[hook]
    assert {what for what, _, _ in sources} <= {one.what for one in findings if one.old}
    assert len(findings) > len(sources) + len(assumptions.WRAPPER_ATTRIBUTES) + 2


def test_each_series_calls_one_module_of_ours():
    called = {
        version: assumptions.hooks(pins.load(version).patches) for version in pins.supported()
    }
    assert called["0.6.3"] == {"flat_wrapper"} and called["0.7.2"] == {"backend"}
    assert all(len(hooks) == 1 for hooks in called.values())


def test_releases_that_share_a_hook_call_it_alike():
    """A change of the hook's calls has to reach the series of every release."""
    calls: dict[str, set] = {}
    for version in pins.supported():
        folder = pins.load(version).patches
        added = [
            line
            for one in patch.read_series(folder)
            for line in (folder / one.name).read_text().splitlines()
            if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))
        ]
        (hook,) = assumptions.hooks(folder)
        calls.setdefault(hook, set()).add(tuple(added))
    assert {hook: len(ways) for hook, ways in calls.items()} == dict.fromkeys(calls, 1)


BINDING = "csrc/batch_mla_binding.cu"
MODULES = "flashinfer/jit/attention/modules.py"


@pytest.mark.parametrize(
    ("path", "old", "new", "where", "state"),
    [
        (
            BINDING,
            "Plan(T a,\n  T b);",
            "Plan(T a,\n  T b, T c);",
            "MLAPagedAttentionPlan",
            "changed",
        ),
        (BINDING, "AttentionRun", "AttentionRunPaged", "MLAPagedAttentionRun", "gone"),
        (MODULES, "planabi2", "planabi3", "get_batch_mla_uri", "changed"),
        (MODULES, "class JitSpec", "class Other", "modules.JitSpec", "gone"),
        ("flashinfer/mla.py", "_cached_module", "_module", "_cached_module", "gone"),
        ("flashinfer/mla.py", "_cached_module", "x._cached_module", "_cached_module", "holds"),
        (MODULES, "other = 1", "other = 2", "get_batch_mla_uri", "holds"),
    ],
)
def test_an_assumption_that_no_longer_holds_is_named(tmp_path, path, old, new, where, state):
    trees = {
        BINDING: "void BatchMLAPagedAttentionPlan(T a,\n  T b);\n"
        "void BatchMLAPagedAttentionRun(T a);\n",
        MODULES: "other = 1\n\n\ndef get_batch_mla_uri(q):\n    return f'{q}_planabi2'\n\n\n"
        "class JitSpec:\n    pass\n",
        "flashinfer/mla.py": "self._cached_module = None\n",
    }
    for name, text in trees.items():
        write(tmp_path / "old" / name, text)
        write(tmp_path / "new" / name, text.replace(old, new) if name == path else text)
    write(
        tmp_path / "package" / "jit.py",
        "from flashinfer.jit.attention.modules import JitSpec\n",
    )
    write(tmp_path / "package" / "flat_wrapper.py", "from flashinfer.absent import Name\n")
    trees = (tmp_path / "old", tmp_path / "new", tmp_path / "package")
    findings = assumptions.compare(*trees, {"backend"})
    assert not [one for one in findings if "absent" in one.where]
    found = [one for one in findings if where in one.where]
    assert state in [one.state for one in found], found
    if state == "changed":
        assert (found[0].old != found[0].new) and found[0].new


def test_names_are_found_through_star_imports(tmp_path):
    write(tmp_path / "flashinfer" / "mla" / "__init__.py", "from ._core import *\n")
    write(tmp_path / "flashinfer" / "mla" / "_core.py", "class Wrapper:\n    pass\n")
    assert assumptions._defines(tmp_path, "flashinfer.mla", "Wrapper")
    assert not assumptions._defines(tmp_path, "flashinfer.mla", "Other")
    assert assumptions._defines(tmp_path, "flashinfer", "mla")
