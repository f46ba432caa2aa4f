"""`./build.sh bump VERSION`: takes our series to another FlashInfer release, as far as it goes.

Each patch is merged three ways: upstream's old file, our patched one, upstream's new file. What
merges cleanly becomes the patch of the new release. What does not stays in the patched tree with
conflict markers, ready for an editor and `./build.sh --base VERSION patches refresh PATCH`.
"""

import difflib
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from mla_fp8kv_build import assumptions, files, patch, series
from mla_fp8kv_build import pin as pins
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.fetch import fetch_unpinned
from mla_fp8kv_build.paths import BUILD, PACKAGE
from mla_fp8kv_build.pin import Pin
from mla_fp8kv_build.unpack import unpack, unpacked


@dataclass
class Outcome:
    """What became of one patch: applied, merged, conflict, waits, upstream has it, file is gone."""

    name: str
    states: dict[str, str] = field(default_factory=dict)  # file -> state


def pin_release(old: Pin, version: str) -> Pin:
    """The pin of `version`; its PIN file is written when there is none yet."""
    path = pins.PINS / f"{version}.toml"
    if not path.is_file():
        _, sha256 = fetch_unpinned(old.name, version)
        sdist = f"{old.name.replace('-', '_')}-{version}.tar.gz"
        with files.new_file(path) as partial:
            partial.write_text(
                f"# The FlashInfer release that patches/{version} applies to. build.sh refuses any "
                f'other bytes.\nname = "{old.name}"\nversion = "{version}"\nsdist = "{sdist}"\n'
                f'sha256 = "{sha256}"\nlicence = "{old.licence}"\n\n'
                f"# Our own number behind the release: the wheel is {version}+mlafp8.<local>.\n"
                "local = 1\n"
            )
    return pins.load(version)


def bump(old: Pin, version: str) -> str:
    """Pin, unpack, merge and compare; returns the report, which is also kept beside the diffs."""
    new = pin_release(old, version)
    if new.patches.exists():
        raise BuildError(f"{new.patches} exists; './build.sh --base {version}' builds on it.")
    if not unpacked(new):
        sdist, _ = fetch_unpinned(new.name, version)
        unpack(new, sdist)
    outcomes, conflicts = carry_over(old, new)
    series.make_patched(new)
    for path, text in conflicts.items():
        (new.patched / path).write_text(text)
    findings = assumptions.compare(
        old.pristine, new.pristine, PACKAGE, assumptions.hooks(old.patches)
    )
    kept = BUILD / f"bump-{version}"
    with files.new_directory(kept) as directory:
        report = _report(old, new, outcomes, findings, directory)
        report += f"\ndiffs are in {kept}"
        (directory / "report.txt").write_text(report + "\n")
    return report


def carry_over(old: Pin, new: Pin) -> tuple[list[Outcome], patch.Contents]:
    """Write patches/<new> from patches/<old>.

    Returns what became of each patch, and the text with conflict markers of files that one of them
    could not be merged into. Later patches of such a file wait until it is resolved.
    """
    before_old: patch.Contents = {}
    before_new: patch.Contents = {}
    conflicts: patch.Contents = {}
    outcomes = []
    with files.new_directory(new.patches) as directory:
        for one in patch.read_series(old.patches):
            after_old = dict(before_old)
            patch.apply(one, after_old, lambda path: (old.pristine / path).read_text())
            after_new = dict(before_new)
            outcome = Outcome(one.name)
            for path in (diff.path for diff in one.diffs):
                if not (new.pristine / path).is_file():
                    outcome.states[path] = "file is gone"
                    continue
                was_old = before_old.get(path) or (old.pristine / path).read_text()
                was_new = before_new.get(path) or (new.pristine / path).read_text()
                before_new.setdefault(path, was_new)
                after_new.setdefault(path, was_new)
                if path in conflicts:
                    outcome.states[path] = "waits"
                    continue
                text, clean = merge(was_new, was_old, after_old[path], one.name, new.version)
                if not clean:
                    conflicts[path] = text
                    outcome.states[path] = "conflict"
                    continue
                after_new[path] = text
                applied = "applied" if was_new == was_old else "merged"
                outcome.states[path] = "upstream has it" if text == was_new else applied
            head = one.head.replace(
                f"Applies-to: {old.name} {old.version}", f"Applies-to: {new.name} {new.version}"
            )
            carried = patch.Patch(one.name, head, one.fields, [])
            (directory / one.name).write_text(patch.export(carried, before_new, after_new))
            before_old, before_new = after_old, after_new
            outcomes.append(outcome)
        (directory / "series").write_text((old.patches / "series").read_text())
        changed = {
            path: text
            for path, text in before_new.items()
            if text != (new.pristine / path).read_text()
        }
        (directory / "touched.sha256").write_text(series.touched_text(changed))
    return outcomes, conflicts


def merge(ours: str, base: str, theirs: str, name: str, version: str) -> tuple[str, bool]:
    """Three-way merge of a file by git; (text, whether it is free of conflicts)."""
    with tempfile.TemporaryDirectory() as directory:
        paths = []
        for part, text in (("ours", ours), ("base", base), ("theirs", theirs)):
            paths.append(Path(directory) / part)
            paths[-1].write_text(text)
        result = subprocess.run(
            [
                *("git", "merge-file", "-p", "--diff3"),
                *("-L", f"FlashInfer {version}", "-L", "before", "-L", name, *map(str, paths)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode < 0 or result.returncode > 127:
        raise BuildError(f"git could not merge {name}: {result.stderr.strip()}.")
    return result.stdout, result.returncode == 0


def _report(
    old: Pin,
    new: Pin,
    outcomes: list[Outcome],
    findings: list[assumptions.Finding],
    directory: Path,
) -> str:
    """The report; what upstream changed goes, file by file, into diffs in `directory`."""
    lines = [f"FlashInfer {old.version} -> {new.version}", "", "patches"]
    touched = sorted({path for outcome in outcomes for path in outcome.states})
    for outcome in outcomes:
        for path, state in outcome.states.items():
            lines.append(f"  {state:<15} {outcome.name}  {path}")
    lines += ["", "what upstream changed in the files we touch"]
    for path in touched:
        lines.append(f"  {_changes(old.pristine / path, new.pristine / path, path, directory)}")
    lines += ["", "what we assume about the rest"]
    for one in sorted(findings, key=lambda one: ("gone", "changed", "holds").index(one.state)):
        lines.append(f"  {one.state:<15} {one.what}: {one.where}")
        if one.state == "changed":
            _write_diff(one.old, one.new, one.where, directory)
    open_ends = sum(
        state not in ("applied", "merged", "upstream has it")
        for outcome in outcomes
        for state in outcome.states.values()
    )
    doubts = sum(one.state != "holds" for one in findings)
    lines += [
        "",
        f"{open_ends} patched files to resolve, {doubts} assumptions to read",
        f"next: edit {new.patched}, then ./build.sh --base {new.version} patches refresh [PATCH]"
        if open_ends
        else f"next: ./build.sh --base {new.version} test",
    ]
    return "\n".join(lines)


def _changes(old: Path, new: Path, path: str, directory: Path) -> str:
    if not new.is_file():
        return f"{path}: gone"
    before, after = old.read_text(), new.read_text()
    if before == after:
        return f"{path}: nothing"
    diff = _write_diff(before, after, path, directory)
    added = sum(line.startswith("+") for line in diff[2:])
    removed = sum(line.startswith("-") for line in diff[2:])
    return f"{path}: +{added} -{removed} lines"


def _write_diff(before: str, after: str, where: str, directory: Path) -> list[str]:
    diff = list(
        difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), "old", "new"
        )
    )
    name = where.replace("/", "_").replace(": ", "_")
    (directory / f"{name}.diff").write_text("".join(diff))
    return diff
