"""A FlashInfer release of invented files, and a patch that changes one of them."""

from pathlib import Path

TREE = {
    "flashinfer/__init__.py": "",
    "flashinfer/_build_meta.py": '__version__ = "9.9.9"\n',
    "flashinfer/mla.py": "".join(f"line {number}\n" for number in range(1, 31)),
    "flashinfer/other.py": "first\nsecond\nthird\n",
    "csrc/run.cu": "int run();\n",
    "PKG-INFO": "Metadata-Version: 2.4\nName: flashinfer-python\nVersion: 9.9.9\n"
    "Requires-Python: >=3.10\nRequires-Dist: torch\n",
    "pyproject.toml": '[tool.setuptools.package-dir]\n"flashinfer.data" = "."\n',
}
HEADER = """\
Subject: a change
Why: it is needed
 for a reason of two lines
Applies-to: flashinfer-python 9.9.9
Forwarded: no
Dropped-when: never
Test: tests/test_it.py

"""
PATCH = (
    HEADER
    + """\
diff --git a/flashinfer/mla.py b/flashinfer/mla.py
--- a/flashinfer/mla.py
+++ b/flashinfer/mla.py
@@ -2,7 +2,7 @@ line 1
 line 2
 line 3
 line 4
-line 5
+line five
 line 6
 line 7
 line 8
@@ -18,6 +18,7 @@ line 17
 line 18
 line 19
 line 20
+line 20 and a half
 line 21
 line 22
 line 23
"""
)


def write_tree(folder: Path) -> None:
    for name, text in TREE.items():
        write(folder / name, text)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
