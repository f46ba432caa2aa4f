"""What we take for granted about FlashInfer beyond the lines we patch, checked on a source tree.

Three kinds: names that our package imports; attributes of the planned wrapper that SGLang reads and
writes itself; and pieces of upstream's source whose meaning we build on. The last are compared as
text between two releases: equal means that the assumption holds, changed means that somebody has to
read it.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mla_fp8kv_build import files

# SGLang's fast_mla_decode_plan and fast_mla_prefill_plan use these on replay of a CUDA graph.
WRAPPER_ATTRIBUTES = (
    "_cached_module",
    "_causal",
    "_float_workspace_buffer",
    "_int_workspace_buffer",
    "_kv_indices_buf",
    "_kv_indptr_buf",
    "_kv_len_arr_buf",
    "_page_size",
    "_pin_memory_int_workspace_buffer",
    "_qo_indptr_buf",
    "_sm_scale",
)
_WRAPPER_SOURCES = ("flashinfer/mla", "flashinfer/mla.py")
_MODULES = "flashinfer/jit/attention/modules.py"
_BATCH_MLA = "flashinfer/mla/_batch_mla"

# (what we assume, file, name of the function, class or C++ declaration), on every base ...
SOURCES = (
    ("signature of a module's plan", "csrc/batch_mla_binding.cu", "BatchMLAPagedAttentionPlan"),
    ("signature of a module's run", "csrc/batch_mla_binding.cu", "BatchMLAPagedAttentionRun"),
    ("cache key of upstream's modules", _MODULES, "get_batch_mla_uri"),
    ("build specification of a module", "flashinfer/jit/core.py", "gen_jit_spec"),
)
# ... and where a module of ours is the one that the series hooks in.
SOURCES_OF_HOOK = {
    "flat_wrapper": (
        ("place of compiled modules", "flashinfer/jit/env.py", "_get_aot_dir"),
        ("compiling and loading", "flashinfer/jit/core.py", "JitSpec"),
        ("the wrapper", "flashinfer/mla.py", "BatchMLAPagedAttentionWrapper"),
    ),
    "backend": (
        ("place of compiled modules", "flashinfer/jit/env.py", "get_aot_artifacts"),
        ("compiling and loading", "flashinfer/jit/core.py", "JitSpecNvcc"),
        ("capability rules", f"{_BATCH_MLA}/_backends/_capabilities.py", "*"),
        ("rules of backend='auto'", f"{_BATCH_MLA}/_auto_policy.py", "*"),
        ("contract of plan and run", f"{_BATCH_MLA}/_contracts.py", "*"),
        ("base of the FA2 and FA3 backends", f"{_BATCH_MLA}/_backends/_fa_common.py", "*"),
        ("FA2 backend", f"{_BATCH_MLA}/_backends/fa2_backend.py", "*"),
        ("FA3 backend", f"{_BATCH_MLA}/_backends/fa3_backend.py", "*"),
    ),
}


@dataclass(frozen=True)
class Finding:
    """One assumption on a new release. state: holds, changed or gone."""

    what: str
    where: str
    state: str
    old: str = ""
    new: str = ""


def hooks(patches: Path) -> set[str]:
    """The modules of our package that a series calls."""
    text = "".join(path.read_text() for path in patches.glob("*.patch"))
    return set(re.findall(r"^\+.*\bfrom mla_fp8kv\.(\w+) import", text, re.MULTILINE))


def compare(old: Path, new: Path, package: Path, hooked: set[str]) -> list[Finding]:
    """Every assumption, checked on the tree `new`; `old` is the tree where it holds.

    hooked: the result of `hooks` for the series of the old release.
    """
    sources = [*SOURCES, *(one for hook in sorted(hooked) for one in SOURCES_OF_HOOK[hook])]
    return [
        *_imports(new, package, SOURCES_OF_HOOK.keys() - hooked),
        *_attributes(new),
        *(_source(what, old, new, path, name) for what, path, name in sources),
    ]


def _imports(tree: Path, package: Path, unused: set[str]) -> Iterator[Finding]:
    """Names that `package` imports from flashinfer, in all but its modules `unused`."""
    wanted = set()
    for path in files.source_files(package):
        if path.suffix != ".py" or path.stem in unused:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashinfer"):
                wanted |= {(node.module, alias.name) for alias in node.names}
    for module, name in sorted(wanted):
        state = "holds" if _defines(tree, module, name) else "gone"
        yield Finding("import of our package", f"{module}.{name}", state)


def _defines(tree: Path, module: str, name: str) -> bool:
    folder = tree.joinpath(*module.split("."))
    if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
        return True
    path = next(
        (p for p in (folder.with_suffix(".py"), folder / "__init__.py") if p.is_file()), None
    )
    if path is None:
        return False
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
                source = _star_source(module, path, node)
                if source != module and _defines(tree, source, name):
                    return True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return name in names


def _star_source(module: str, path: Path, node: ast.ImportFrom) -> str:
    """Absolute name of the module that `from X import *` in `module` names."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *(node.module or "").split(".")]).rstrip(".")


def _attributes(tree: Path) -> Iterator[Finding]:
    """Attributes of the wrapper, by name anywhere in the wrapper's sources."""
    text = ""
    for place in _WRAPPER_SOURCES:
        path = tree / place
        found = files.source_files(path) if path.is_dir() else [path] if path.is_file() else []
        text += "".join(one.read_text() for one in found if one.suffix == ".py")
    for name in WRAPPER_ATTRIBUTES:
        state = "holds" if re.search(rf"\b{name}\b", text) else "gone"
        yield Finding("wrapper attribute that SGLang uses", name, state)


def _source(what: str, old: Path, new: Path, path: str, name: str) -> Finding:
    where = path if name == "*" else f"{path}: {name}"
    before, after = _text(old / path, name), _text(new / path, name)
    if after is None:
        return Finding(what, where, "gone", before or "")
    return Finding(what, where, "holds" if before == after else "changed", before or "", after)


def _text(path: Path, name: str) -> str | None:
    """Source of a top-level Python definition or a C++ declaration; None if it is not there."""
    if not path.is_file():
        return None
    text = path.read_text()
    if name == "*":
        return text
    if path.suffix != ".py":
        # A declaration: from the line that names it to the closing bracket.
        found = re.search(rf"^[^\n/]*\b{name}\([^)]*\)", text, re.MULTILINE)
        return found.group() + "\n" if found else None
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return (ast.get_source_segment(text, node) or "") + "\n"
    return None
