"""`python -m mla_fp8kv sglang-patch [--revert]`: the source patch for an SGLang without plug-ins.

A patch names the SHA-256 of the file it is for and of what it makes, so there is nothing to
guess: any other file is refused, whatever the context lines say.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path

from . import installed

# In the wheel the patches lie in the package, in a checkout at its top.
_PACKAGE = Path(__file__).resolve().parent
_FOLDERS = tuple(top / "patches" / "sglang" for top in (_PACKAGE, _PACKAGE.parents[1]))
_BACKUP = ".before-mla-fp8kv"


class PatchError(Exception):
    """Why nothing was changed, in one sentence."""


class Patch:
    """One patch of one file, with the digests of the file before and after."""

    def __init__(self, file: Path):
        text = file.read_text("utf-8")
        header, _, self._diff = text.partition("\ndiff --git ")
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", header, re.MULTILINE))
        self.before, self.after = fields["Before"], fields["After"]
        # a/python/sglang/<path>, as in SGLang's repository
        self.path = Path(re.search(r"^--- a/python/sglang/(\S+)", self._diff, re.MULTILINE)[1])

    def apply(self, text: str) -> str:
        """`text` with every hunk applied at exactly its own lines."""
        old, new, at = text.splitlines(keepends=True), [], 0
        for hunk in re.split(r"^(?=@@ )", self._diff, flags=re.MULTILINE)[1:]:
            first, *lines = hunk.splitlines(keepends=True)
            start = int(re.match(r"@@ -(\d+)", first)[1]) - 1
            new += old[at:start]
            at = start
            for line in lines:
                if line[0] != "+":
                    if at >= len(old) or old[at] != line[1:]:
                        raise PatchError(f"The patch does not fit {self.path} at line {at + 1}.")
                    at += 1
                if line[0] != "-":
                    new.append(line[1:])
        return "".join(new + old[at:])


def available() -> dict[str, Path]:
    """SGLang version -> its patch."""
    files = (file for folder in _FOLDERS for file in sorted(folder.glob("*/*.patch")))
    return {file.parent.name: file for file in files}


def is_applied(version: str | None, file: Path) -> bool:
    """Whether `file` is what the patch for this SGLang version makes."""
    patches = available()
    return version in patches and _digest(file) == Patch(patches[version]).after


def run(revert: bool = False) -> str:
    """Patch the installed SGLang, or undo it; returns what was done, raises PatchError."""
    root, version = installed.package_dir("sglang"), installed.version("sglang")
    if root is None:
        raise PatchError("SGLang is not installed beside this package.")
    if (root / "srt" / "plugins").is_dir():
        raise PatchError(
            f"SGLang {version} loads our plug-in when it starts and needs no patch; "
            "'python -m mla_fp8kv doctor' says whether it will be active."
        )
    patches = available()
    if version not in patches:
        raise PatchError(
            f"There is a patch for SGLang {', '.join(patches) or '(none)'}, installed is {version}."
        )
    patch = Patch(patches[version])
    file = root / patch.path
    if not file.is_file():
        raise PatchError(f"{file} does not exist; is SGLang {version} installed whole?")
    return _undo(patch, file) if revert else _apply(patch, file)


def _apply(patch: Patch, file: Path) -> str:
    digest = _digest(file)
    if digest == patch.after:
        return f"{file} is patched already."
    if digest != patch.before:
        raise PatchError(
            f"{file} is not the file of the release (SHA-256 {digest}, expected {patch.before}); "
            "nothing was changed."
        )
    if not installed.flashinfer_is_ours():
        raise PatchError(
            "FlashInfer in this environment is not the build with FP8 KV for MLA; "
            "install its wheel first."
        )
    patched = patch.apply(file.read_text("utf-8"))
    if hashlib.sha256(patched.encode()).hexdigest() != patch.after:
        raise PatchError(f"The patch does not give the expected {patch.path}; nothing was changed.")
    backup = file.with_name(file.name + _BACKUP)
    shutil.copy2(file, backup)
    _replace(file, patched)
    return f"patched {file}; the original is {backup.name} beside it."


def _undo(patch: Patch, file: Path) -> str:
    backup = file.with_name(file.name + _BACKUP)
    digest = _digest(file)
    if digest == patch.before:
        return f"{file} is not patched."
    if digest != patch.after:
        raise PatchError(
            f"{file} was edited after it was patched (SHA-256 {digest}); nothing was changed."
        )
    if not backup.is_file() or _digest(backup) != patch.before:
        raise PatchError(
            f"The backup {backup} is missing or not the original; reinstall SGLang to go back."
        )
    os.replace(backup, file)
    return f"restored {file}."


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _replace(file: Path, text: str) -> None:
    """Write beside the file and rename: an interrupted run leaves the old or the new file whole."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, "utf-8")
    shutil.copymode(file, temporary)
    os.replace(temporary, file)
