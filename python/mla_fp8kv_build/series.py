"""The patched tree: made from the pristine one, checked, edited, and exported back to patches."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from mla_fp8kv_build import files, patch
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import ROOT
from mla_fp8kv_build.pin import Pin

_STAMP = ".mla-fp8kv.json"


def _reader(tree: Path):
    return lambda path: (tree / path).read_text()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _replay(pin: Pin) -> Iterator[tuple[patch.Patch, patch.Contents, patch.Contents]]:
    """Each patch with the files it or an earlier one changes, before and after it.

    What the caller changes in the files after a patch is what the next patch starts from.
    """
    after: patch.Contents = {}
    for one in patch.read_series(pin.patches):
        before = dict(after)
        patch.apply(one, after, _reader(pin.pristine))
        for path in after.keys() - before.keys():
            before[path] = _reader(pin.pristine)(path)
        yield one, before, after


def result(pin: Pin) -> patch.Contents:
    """Every file that the series changes, as it is after the last patch."""
    states = [after for _, _, after in _replay(pin)]
    return states[-1] if states else {}


def expected(pin: Pin) -> dict[str, str]:
    """path -> SHA-256 after the series, from `touched.sha256` (the format of sha256sum)."""
    path = pin.patches / "touched.sha256"
    if not path.is_file():
        raise BuildError(f"{path} is missing; './build.sh patches refresh' writes it.")
    return {name: sha for sha, name in (line.split() for line in path.read_text().splitlines())}


def key(pin: Pin) -> str:
    """Changes when the pin or anything in the series changes."""
    return _sha256(pin.sha256 + files.sha256_tree(files.source_files(pin.patches), pin.patches))


def _edited(tree: Path, touched: dict[str, str]) -> list[str]:
    return [path for path, sha in touched.items() if files.sha256(tree / path) != sha]


def make_patched(pin: Pin) -> bool:
    """Make `pin.patched` and assert that the touched files have the recorded hashes.

    Returns False when it was there already. A tree that was edited by hand is never replaced.
    """
    stamp = pin.patched / _STAMP
    if stamp.is_file():
        known = json.loads(stamp.read_text())
        edited = _edited(pin.patched, known["touched"])
        if edited:
            raise BuildError(
                f"{edited[0]} was edited in {pin.patched}; './build.sh patches refresh [PATCH]' "
                "takes the edit into a patch, deleting the folder drops it."
            )
        if known["key"] == key(pin):
            return False
    contents, touched = result(pin), expected(pin)
    files.need_space(pin.patched.parent, 1, "the patched tree")
    with files.new_directory(pin.patched) as tree:
        shutil.copytree(pin.pristine, tree, dirs_exist_ok=True)
        for path, text in contents.items():
            (tree / path).write_text(text)
        check_touched(tree, contents, touched)
        (tree / _STAMP).write_text(json.dumps({"key": key(pin), "touched": touched}))
    return True


def check_touched(tree: Path, contents: patch.Contents, touched: dict[str, str]) -> None:
    """The files that the series changes are the recorded ones, with the recorded hashes."""
    if set(contents) != set(touched):
        odd = sorted(set(contents) ^ set(touched))[0]
        raise BuildError(
            f"The series and its touched.sha256 do not agree about {odd}; "
            "'./build.sh patches refresh' writes the list anew."
        )
    wrong = _edited(tree, touched)
    if wrong:
        raise BuildError(f"The patched tree is not as expected: {wrong[0]} has another hash.")


def refresh(pin: Pin, into: str | None = None) -> list[str]:
    """Export the series and `touched.sha256`; returns the names of the files that changed.

    Edits in the patched tree go into the patch `into`, by default the last one. They must be in
    files that no later patch changes, or there would be two answers to what belongs where.
    """
    series = patch.read_series(pin.patches)
    into = into or series[-1].name
    names = [one.name for one in series]
    if into not in names:
        raise BuildError(f"The series has no patch {into}; it has {', '.join(names)}.")
    edits = _edits(pin)
    unresolved = next((path for path, text in edits.items() if "\n<<<<<<< " in text), None)
    if unresolved:
        raise BuildError(f"{unresolved} in {pin.patched} still has conflict markers.")
    later = series[names.index(into) + 1 :]
    for path in edits:
        clash = next((p.name for p in later if path in (diff.path for diff in p.diffs)), None)
        if clash:
            raise BuildError(f"{path} is changed by {clash} after {into}; refresh {clash} instead.")
    written = {}
    contents: patch.Contents = {}
    for one, before, contents in _replay(pin):
        if one.name == into:
            for path, text in edits.items():
                before.setdefault(path, _reader(pin.pristine)(path))
                contents[path] = text
        written[one.name] = patch.export(one, before, contents)
    written["touched.sha256"] = touched_text(contents)
    changed = []
    for name, text in written.items():
        path = pin.patches / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            changed.append(name)
    stamp = pin.patched / _STAMP
    if edits and stamp.is_file():
        stamp.write_text(json.dumps({"key": key(pin), "touched": expected(pin)}))
    return changed


def touched_text(contents: patch.Contents) -> str:
    """What `touched.sha256` says for these contents."""
    return "".join(f"{_sha256(contents[path])}  {path}\n" for path in sorted(contents))


def _edits(pin: Pin) -> patch.Contents:
    """Python and CUDA sources that differ between the patched tree and what made it."""
    stamp = pin.patched / _STAMP
    if not stamp.is_file():
        return {}
    touched = json.loads(stamp.read_text())["touched"]
    found = {path: _reader(pin.patched)(path) for path in _edited(pin.patched, touched)}
    for folder in ("flashinfer", "csrc", "include"):
        for pristine in (pin.pristine / folder).rglob("*"):
            path = pristine.relative_to(pin.pristine).as_posix()
            ours = pin.patched / path
            if path in touched or not pristine.is_file() or not ours.is_file():
                continue
            if ours.stat().st_mtime_ns != pristine.stat().st_mtime_ns:
                if ours.read_bytes() != pristine.read_bytes():
                    found[path] = ours.read_text()
    return found


def lint(pin: Pin) -> list[str]:
    """What is wrong with the series, one sentence each; an empty list when nothing is."""
    problems = []
    series = patch.read_series(pin.patches)
    names = [one.name for one in series]
    problems += [f"The series names {name} twice." for name in set(names) if names.count(name) > 1]
    problems += [
        f"{path.name} is in {pin.patches} but not in its series."
        for path in sorted(pin.patches.glob("*.patch"))
        if path.name not in names
    ]
    for one in series:
        problems += _lint_fields(pin, one)
    contents: patch.Contents = {}
    for one, before, contents in _replay(pin):
        if patch.export(one, before, contents) != (pin.patches / one.name).read_text():
            problems.append(
                f"Patch {one.name} is not as it would be exported; "
                "'./build.sh patches refresh' rewrites it."
            )
    if touched_text(contents) != "".join(f"{s}  {p}\n" for p, s in sorted(expected(pin).items())):
        problems.append("touched.sha256 is not as it would be exported.")
    return problems


def _lint_fields(pin: Pin, one: patch.Patch) -> list[str]:
    problems = [
        f"Patch {one.name} has no {field} field."
        for field in patch.FIELDS
        if not one.fields.get(field)
    ]
    problems += [
        f"Patch {one.name} has an unknown field {field}."
        for field in one.fields
        if field not in patch.FIELDS
    ]
    if not one.diffs:
        problems.append(f"Patch {one.name} changes nothing.")
    if one.fields.get("Applies-to", "") != f"{pin.name} {pin.version}":
        problems.append(f"Patch {one.name} does not say Applies-to: {pin.name} {pin.version}.")
    test = one.fields.get("Test", "").split("::")[0].split(" ")[0]
    if test and not (ROOT / test).is_file():
        problems.append(f"Patch {one.name} names the test {test}, which does not exist.")
    return problems
