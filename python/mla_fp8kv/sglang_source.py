"""What we expect of SGLang's FlashInfer MLA backend file, and its functions without the cast.

Pure text and syntax trees: neither SGLang nor torch is imported, so `doctor` can ask too.

Two expressions make SGLang cast a whole FP8 pool, once a layer: `<cache>.to(q.dtype)` on what the
pool hands out, and the query's dtype as the last argument of every plan call. `Backend` finds
them, checks that nothing else depends on them, and rebuilds the four functions that hold them with
`<cache>` alone and with the pool's dtype. Nothing of SGLang's text is kept here: the functions are
rebuilt from the installed file each time.
"""

import __future__

import ast
import copy
import types
from collections.abc import Iterator
from pathlib import Path

MODULE = "sglang.srt.layers.attention.flashinfer_mla_backend"
FILE = Path("srt/layers/attention/flashinfer_mla_backend.py")  # below the sglang package

BACKEND = "FlashInferMLAAttnBackend"
UPDATERS = ("FlashInferMLAIndicesUpdaterDecode", "FlashInferMLAIndicesUpdaterPrefill")
RUNNERS = tuple((BACKEND, name) for name in ("forward_extend", "forward_decode"))
PLANNERS = tuple((name, "call_begin_forward") for name in UPDATERS)

# Where a layer's cache comes from: the pool, or the buffer that context parallel gathers it into.
_POOL_CALL, _GATHERED = "get_key_buffer", "dcp_kv_buffer"
# plan() of FlashInfer's wrapper in its flat form: ..., sm_scale, q_data_type, kv_data_type.
_PLAN_ARGUMENTS = 12
_KV_DTYPE = "_mla_fp8kv_kv_dtype"


class Mismatch(Exception):
    """SGLang's code is not what we expect; the message is one sentence."""


class Backend:
    """The parsed backend file; construction raises Mismatch unless every expectation holds."""

    def __init__(self, text: str, filename: str):
        self.filename = filename
        try:
            self._tree = ast.parse(text, filename)
            self._code = compile(text, filename, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise Mismatch(f"{filename} cannot be parsed: {error.msg}.") from error
        self._functions = {
            target: self._find(*target)
            for target in (*RUNNERS, *PLANNERS, *((name, "__init__") for name in UPDATERS))
        }
        for target in (*RUNNERS, *PLANNERS):
            self._check_rebuildable(target)
        for target in RUNNERS:
            _check_runner(target, self._functions[target])
        for target in PLANNERS:
            _check_planner(target, self._functions[target])
        for name in UPDATERS:
            _check_query_dtype(name, self._functions[name, "__init__"])
        self._check_elsewhere()

    def code(self, target: tuple[str, str]) -> types.CodeType:
        """The code object that the file's own text gives for one of the four functions."""
        code = self._code
        for name in target:
            code = next(
                const
                for const in code.co_consts
                if isinstance(const, types.CodeType) and const.co_name == name
            )
        return code

    def rebuild(self, target: tuple[str, str], module_globals: dict, kv_dtype: object):
        """One of the four functions without the cast, or planning with `kv_dtype`.

        It runs in `module_globals` and keeps file name and line numbers, so a traceback points
        into SGLang's file. The dtype is bound as a closure: SGLang's module gets no new name.
        """
        function = copy.deepcopy(self._functions[target])
        if target in RUNNERS:
            function = _DropCast().visit(function)
        else:
            for call in _plan_calls(function):
                call.args[-1] = ast.copy_location(ast.Name(_KV_DTYPE, ast.Load()), call.args[-1])
        factory = ast.parse(f"def factory({_KV_DTYPE}):\n    return {function.name}")
        factory.body[0].body.insert(0, function)
        namespace: dict = {}
        code = compile(
            ast.fix_missing_locations(factory),
            self.filename,
            "exec",
            flags=__future__.annotations.compiler_flag,
            dont_inherit=True,
        )
        exec(code, module_globals, namespace)
        rebuilt = namespace["factory"](kv_dtype)
        rebuilt.__qualname__ = ".".join(target)
        return rebuilt

    def _find(self, class_name: str, name: str) -> ast.FunctionDef:
        body: list[ast.stmt] = self._tree.body
        for wanted, kind in ((class_name, ast.ClassDef), (name, ast.FunctionDef)):
            found = [node for node in body if isinstance(node, kind) and node.name == wanted]
            if len(found) != 1:
                raise Mismatch(f"{class_name}.{name} is expected once, found {len(found)} times.")
            body = found[0].body
        if found[0].decorator_list:
            raise Mismatch(f"{class_name}.{name} is expected to have no decorator.")
        return found[0]

    def _check_rebuildable(self, target: tuple[str, str]) -> None:
        """Rebuilt outside its class, a function has no super() and no private names."""
        private = [
            node
            for node in ast.walk(self._functions[target])
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("__")
            and not node.attr.endswith("__")
        ]
        if private or self.code(target).co_freevars:
            raise Mismatch(
                f"{'.'.join(target)} is expected to use neither super() nor private names."
            )

    def _check_elsewhere(self) -> None:
        """Nothing outside the four functions may read the cache or plan the wrappers."""
        inside = {id(node) for t in (*RUNNERS, *PLANNERS) for node in ast.walk(self._functions[t])}
        for node in ast.walk(self._tree):
            if id(node) in inside:
                continue
            if isinstance(node, ast.Attribute) and node.attr in (_POOL_CALL, _GATHERED):
                raise Mismatch(f"{node.attr} is read in an unexpected place, line {node.lineno}.")
            if isinstance(node, ast.Call) and _is_plan(node):
                if len(node.args) >= _PLAN_ARGUMENTS:
                    raise Mismatch(f"a wrapper is planned in an unexpected place, {_at(node)}.")


def _at(node: ast.AST) -> str:
    return f"line {node.lineno}: {ast.unparse(node)[:80]}"


def _is_cache(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == _POOL_CALL
    return isinstance(node, ast.Attribute) and node.attr == _GATHERED


def _is_cast(node: ast.AST) -> bool:
    """`<cache>.to(q.dtype)`, exactly."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and _is_cache(node.func.value)
        and [ast.unparse(argument) for argument in node.args] == ["q.dtype"]
        and not node.keywords
    )


def _is_plan(call: ast.Call) -> bool:
    """`<wrapper>.plan(...)`, or one of SGLang's own fast forms of it, `fast_mla_*_plan(...)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr == "plan"
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    return name.startswith("fast_mla_") and name.endswith("_plan")


def _plan_calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    return (n for n in ast.walk(function) if isinstance(n, ast.Call) and _is_plan(n))


class _DropCast(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        return node.func.value if _is_cast(node) else self.generic_visit(node)


def _check_runner(target: tuple[str, str], function: ast.FunctionDef) -> None:
    """The cache is read once from the pool, cast to q.dtype, and only sliced for wrapper.run()."""
    where = ".".join(target)
    casts = [node for node in ast.walk(function) if _is_cast(node)]
    cast_caches = {id(cast.func.value) for cast in casts}
    presence_tests = {
        id(node.left)
        for node in ast.walk(function)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.IsNot)
    }
    for node in ast.walk(function):
        if _is_cache(node) and id(node) not in cast_caches | presence_tests:
            raise Mismatch(f"{where} uses the KV cache other than by .to(q.dtype), {_at(node)}.")
    pool_casts = [cast for cast in casts if isinstance(cast.func.value, ast.Call)]
    if len(pool_casts) != 1:
        raise Mismatch(
            f"{where} is expected to cast the pool by .{_POOL_CALL}(...).to(q.dtype) once, "
            f"found {len(pool_casts)} times."
        )

    assigned = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(node.value is cast for cast in casts)
    ]
    names = {ast.unparse(node.targets[0]) for node in assigned}
    if len(assigned) != len(casts) or len(names) != 1:
        raise Mismatch(f"{where} is expected to assign the cast cache to one variable.")
    (name,) = names
    runs = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "run"
    ]
    handed_over = set()
    for run in runs:
        if len(run.args) != 4 or not {k.arg for k in run.keywords} <= {"out", "return_lse"}:
            raise Mismatch(f"{where} calls run() with unexpected arguments, {_at(run)}.")
        handed_over |= {id(a.value) for a in run.args if isinstance(a, ast.Subscript)}
    stores = {id(node.targets[0]) for node in assigned}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name and id(node) not in handed_over | stores:
            raise Mismatch(f"{where} uses {name} other than by slices for run(), {_at(node)}.")


def _check_planner(target: tuple[str, str], function: ast.FunctionDef) -> None:
    """Every plan call ends in (query dtype, self.data_type), which nothing else reads."""
    where = ".".join(target)
    calls = list(_plan_calls(function))
    if not calls:
        raise Mismatch(f"{where} is expected to plan a wrapper, found no plan call.")
    dtype_arguments = set()
    for call in calls:
        # The fast forms are functions and take the wrapper first.
        expected = _PLAN_ARGUMENTS + isinstance(call.func, ast.Name)
        query, kv = (ast.unparse(argument) for argument in call.args[-2:]) if call.args else "  "
        if (
            len(call.args) != expected
            or call.keywords
            or query not in ("self.data_type", "self.q_data_type")
            or kv != "self.data_type"
        ):
            raise Mismatch(f"{where} plans with unexpected arguments, {_at(call)}.")
        dtype_arguments |= {id(argument) for argument in call.args[-2:]}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr == "data_type":
            if id(node) not in dtype_arguments:
                raise Mismatch(f"{where} uses self.data_type outside plan calls, {_at(node)}.")


def _check_query_dtype(class_name: str, init: ast.FunctionDef) -> None:
    """self.data_type and self.q_data_type are the model's dtype, which the query keeps."""
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "self.data_type",
            "self.q_data_type",
        ):
            if ast.unparse(node.value) != "model_runner.dtype":
                raise Mismatch(
                    f"{class_name} is expected to plan with model_runner.dtype, {_at(node)}."
                )
