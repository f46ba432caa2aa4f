"""Patches apply exactly or not at all, and come out of an export as they went in."""

import pytest
from invented import HEADER, PATCH, TREE
from mla_fp8kv_build import patch
from mla_fp8kv_build.errors import BuildError


def applied(text: str, tree: dict | None = None) -> dict:
    tree = tree or TREE

    def read(path: str) -> str:
        if path not in tree:
            raise FileNotFoundError(path)
        return tree[path]

    contents: dict = {}
    patch.apply(patch.parse("x.patch", text), contents, read)
    return contents


def one_file(hunks: str, path: str = "flashinfer/other.py") -> str:
    return f"{HEADER}diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n{hunks}"


def test_header_fields_are_read_with_their_continuations():
    fields = patch.parse("x.patch", PATCH).fields
    assert tuple(fields) == patch.FIELDS
    assert fields["Why"] == "it is needed for a reason of two lines"


def test_two_hunks_change_their_lines_and_nothing_else():
    lines = TREE["flashinfer/mla.py"].split("\n")
    lines[4] = "line five"
    lines.insert(20, "line 20 and a half")
    assert applied(PATCH) == {"flashinfer/mla.py": "\n".join(lines)}


def test_first_and_last_lines():
    text = one_file("@@ -1,3 +1,4 @@\n+zeroth\n first\n second\n-third\n+last\n")
    assert applied(text)["flashinfer/other.py"] == "zeroth\nfirst\nsecond\nlast\n"


def test_patches_build_on_each_other():
    contents = applied(PATCH)
    again = PATCH.replace("-line 5", "-line five").replace("+line five", "+line V")
    again = again[: again.index("@@ -18")]
    patch.apply(patch.parse("y.patch", again), contents, None)
    assert "line V\n" in contents["flashinfer/mla.py"]


@pytest.mark.parametrize(
    "tree",
    {
        "context line changed": {"line 22\n": "line twenty-two\n"},
        "removed line changed": {"line 20\n": "line 20 \n"},
        "the place moved by a line": {"line 10\n": "line 10\nanother\n"},
    }.values(),
)
def test_no_fuzz_and_no_offset(tree):
    changed = dict(TREE)
    for old, new in tree.items():
        changed["flashinfer/mla.py"] = changed["flashinfer/mla.py"].replace(old, new)
    with pytest.raises(BuildError) as error:
        applied(PATCH, changed)
    assert str(error.value) == (
        "Patch x.patch hunk 2 does not apply to flashinfer/mla.py at line 18."
    )


def test_a_file_upstream_does_not_have():
    with pytest.raises(BuildError, match="changes flashinfer/new.py, which upstream does not have"):
        applied(one_file("@@ -1 +1 @@\n-a\n+b\n", "flashinfer/new.py"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (one_file("@@ -1,2 +1,2 @@\n first\n"), "hunk 1 is cut short"),
        (one_file("@@ -1 +1 @@\n-first\n+one\nstray\n"), "'stray' is not part of a hunk"),
        (
            one_file("@@ -3 +3 @@\n-third\n+3\n\\ No newline at end of file\n"),
            "is not part of a hunk",
        ),
        (
            f"{HEADER}diff --git a/n.py b/n.py\nnew file mode 100644\n--- /dev/null\n+++ b/n.py\n",
            "adds, removes or renames a file",
        ),
        (
            f"{HEADER}diff --git a/o.py b/n.py\n--- a/o.py\n+++ b/n.py\n@@ -1 +1 @@\n-a\n+b\n",
            "adds, removes or renames a file",
        ),
    ],
)
def test_malformed_patches_are_refused(text, sentence):
    with pytest.raises(BuildError, match=sentence):
        patch.parse("x.patch", text)


def test_a_patch_that_waits_for_edits_changes_nothing():
    assert applied(HEADER) == {}


def test_export_gives_back_the_patch(monkeypatch, tmp_path):
    # A user's git configuration must not show in the text.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text("[diff]\n\tcontext = 9\n\tmnemonicPrefix = true\n")
    assert patch.export(patch.parse("x.patch", PATCH), TREE, {**TREE, **applied(PATCH)}) == PATCH


def test_export_takes_in_a_newly_changed_file():
    after = {**TREE, **applied(PATCH), "flashinfer/other.py": "first\n2\nthird\n"}
    text = patch.export(patch.parse("x.patch", PATCH), TREE, after)
    assert text.startswith(PATCH)
    assert "-second\n+2\n" in text.removeprefix(PATCH)
