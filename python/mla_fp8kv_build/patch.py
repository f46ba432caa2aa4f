"""Reads, applies and exports the patch series of a release.

A patch is a header of mail-style fields, an empty line and unified diffs. It hooks into files that
upstream has; new code belongs in python/mla_fp8kv. Hunks apply at their exact line with all of
their context or not at all: the pin fixes upstream's bytes, so an offset would mean that the
series and the pin do not belong together. (`git apply` is of no use here: inside a git-ignored
folder it exits 0 and does nothing.)
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mla_fp8kv_build.errors import BuildError

FIELDS = ("Subject", "Why", "Applies-to", "Forwarded", "Dropped-when", "Test")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")

Contents = dict[str, str]  # path in upstream's tree -> text


@dataclass(frozen=True)
class Hunk:
    """Lines `old` at the 1-based line `start` become `new`."""

    start: int
    old: list[str]
    new: list[str]


@dataclass(frozen=True)
class FileDiff:
    """The hunks of one file, in order."""

    path: str
    hunks: list[Hunk]


@dataclass(frozen=True)
class Patch:
    """One patch file. `head` is its text before the first diff, `fields` the header in it."""

    name: str
    head: str
    fields: dict[str, str]
    diffs: list[FileDiff]


def read_series(directory: Path) -> list[Patch]:
    """The patches that `directory`/series names, in its order."""
    series = directory / "series"
    if not series.is_file():
        raise BuildError(f"{directory} has no series file.")
    names = [line.strip() for line in series.read_text().splitlines()]
    patches = []
    for name in filter(lambda name: name and not name.startswith("#"), names):
        path = directory / name
        if not path.is_file():
            raise BuildError(f"The series names {name}, which {directory} does not have.")
        patches.append(parse(name, path.read_text()))
    return patches


def parse(name: str, text: str) -> Patch:
    """Read one patch; anything that is not a plain change of existing files is refused.

    A patch without a diff is one that `bump` could not carry over: a header that waits for edits.
    """
    head, *bodies = re.split(r"^(?=diff --git )", text, maxsplit=1, flags=re.MULTILINE)
    body = "".join(bodies)
    diffs = [
        _parse_file(name, part)
        for part in re.split(r"^diff --git .*\n", body, flags=re.MULTILINE)[1:]
    ]
    return Patch(name, head, _parse_fields(head), diffs)


def _parse_fields(head: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    key = ""
    for line in head.splitlines():
        match = re.match(r"([A-Z][A-Za-z-]*): *(.*)", line)
        if match:
            key, fields[match.group(1)] = match.group(1), match.group(2).strip()
        elif line.startswith(" ") and key:
            fields[key] += " " + line.strip()
    return fields


def _parse_file(name: str, text: str) -> FileDiff:
    paths = re.match(r"(?:index .*\n)?--- a/(.+)\n\+\+\+ b/(.+)\n", text)
    if not paths or paths.group(1) != paths.group(2):
        raise BuildError(f"Patch {name} adds, removes or renames a file; patches change files.")
    path = paths.group(1)
    hunks: list[Hunk] = []
    left = [0, 0]  # old and new lines that the current hunk still has to bring
    for line in text[paths.end() :].removesuffix("\n").split("\n"):
        header = _HUNK.match(line)
        if header and left == [0, 0]:
            start, old, _, new = header.groups()
            hunks.append(Hunk(int(start), [], []))
            left = [int(old or 1), int(new or 1)]
            continue
        kind, rest = line[:1], line[1:]
        if not hunks or kind not in (" ", "-", "+"):
            raise BuildError(f"Patch {name}, {path}: {line!r} is not part of a hunk.")
        if kind != "+":
            hunks[-1].old.append(rest)
            left[0] -= 1
        if kind != "-":
            hunks[-1].new.append(rest)
            left[1] -= 1
    if left != [0, 0]:
        raise BuildError(f"Patch {name}, {path}: hunk {len(hunks)} is cut short.")
    return FileDiff(path, hunks)


def apply(patch: Patch, contents: Contents, read: Callable[[str], str]) -> None:
    """Apply one patch to `contents`, which takes files it lacks from `read`."""
    for diff in patch.diffs:
        if diff.path not in contents:
            try:
                contents[diff.path] = read(diff.path)
            except FileNotFoundError:
                raise BuildError(
                    f"Patch {patch.name} changes {diff.path}, which upstream does not have."
                ) from None
        lines = contents[diff.path].split("\n")
        shift = 0
        for number, hunk in enumerate(diff.hunks, start=1):
            # "@@ -0,0" inserts in front of the first line.
            at = max(hunk.start - 1, 0) + shift
            if lines[at : at + len(hunk.old)] != hunk.old:
                raise BuildError(
                    f"Patch {patch.name} hunk {number} does not apply to {diff.path} "
                    f"at line {hunk.start}."
                )
            lines[at : at + len(hunk.old)] = hunk.new
            shift += len(hunk.new) - len(hunk.old)
        contents[diff.path] = "\n".join(lines)


def export(patch: Patch, before: Contents, after: Contents) -> str:
    """The canonical text of a patch: its header and git's diff of the files it changes."""
    paths = [diff.path for diff in patch.diffs]
    new = sorted(path for path in after if path not in paths and before.get(path) != after[path])
    return patch.head + "".join(_diff(path, before[path], after[path]) for path in paths + new)


def _diff(path: str, before: str, after: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        for side, text in (("a", before), ("b", after)):
            file = Path(directory) / side / path
            file.parent.mkdir(parents=True)
            file.write_text(text)
        # The user's git configuration must not change the format.
        environment = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
        result = subprocess.run(
            ["git", "diff", "--no-index", "--no-prefix", "--no-color", f"a/{path}", f"b/{path}"],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode not in (0, 1):
        raise BuildError(f"git could not compare two versions of {path}: {result.stderr.strip()}.")
    # Blob names differ in length between git versions and say nothing the pin does not.
    return re.sub(r"^index .*\n", "", result.stdout, count=1, flags=re.MULTILINE)
