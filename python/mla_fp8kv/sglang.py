"""SGLang plug-in: its FlashInfer MLA backend reads an FP8 KV cache as it is.

`activate` is the entry point in group `sglang.srt.plugins`; SGLang calls it in each of its
processes. It checks every expectation about SGLang's code (`sglang_source`) and registers one
AFTER hook, on `FlashInferMLAAttnBackend.__init__`, through SGLang's own HookRegistry. For each
backend object that serves an FP8 pool, the hook first tries the kernel on one token (which also
compiles it), then puts four rebuilt methods on that object: `forward_extend` and `forward_decode`
without `.to(q.dtype)` on the cache, and the two updaters' `call_begin_forward` planning with the
pool's dtype. The query's dtype stays the model's.

Why rebuilt functions and not wrappers around SGLang's: the two expressions are all we depend on,
and they are the part that has not moved. 0.5.9, 0.5.15, 0.5.20, 0.5.22 and 0.5.23 all hold
`<...>.get_key_buffer(...).to(q.dtype)` and plan calls that end in `self.data_type`, while the pool
moved from forward_batch to the backend, the CUDA graph entry points were renamed and context
parallel added a second cache; a stand-in for the pool or for the wrapper would have had to follow.
It also leaves nothing in the path of a step: no wrapper per layer, no tensor subclass, nothing
that torch.compile or a graph capture could trip over.

Why on the object and not on the class: a server whose pool is not FP8, or holds another layout,
runs SGLang's own functions, not ours taking another branch. Either all four are replaced or none.

Off by MLA_FP8KV_SGLANG=0, or by an SGLANG_PLUGINS list without `mla_fp8kv`.
"""

import functools
import importlib
import logging
import os
import types
from pathlib import Path

from . import installed, sglang_source

SUPPORTED = ("0.5.23",)
SWITCH = "MLA_FP8KV_SGLANG"
HOOK_TARGET = f"{sglang_source.MODULE}.{sglang_source.BACKEND}.__init__"

_log = logging.getLogger(__name__)
_said: set[str] = set()


class Refused(Exception):
    """Why SGLang stays as it is, in one sentence."""


def activate() -> None:
    """Register the hook, or log one line that says why SGLang stays as it is; never raises."""
    if os.environ.get(SWITCH) == "0":
        _say(logging.INFO, f"off by {SWITCH}=0.")
        return
    try:
        if not installed.flashinfer_is_ours():
            raise Refused(
                "the FlashInfer that is imported "
                f"({installed.version('flashinfer-python') or 'not installed'}) is not the build "
                "with FP8 KV for MLA."
            )
        _register()
    except Exception as error:  # whatever it is, SGLang has to start
        _say(logging.WARNING, f"SGLang runs as without it: {_sentence(error)}")


def _register() -> None:
    try:
        module = importlib.import_module(sglang_source.MODULE)
        source = read_source(Path(module.__file__))
        originals = _functions(module)
        _check_loaded(originals, source)
    except (sglang_source.Mismatch, Refused) as error:
        raise Refused(f"{error} {versions_sentence()}") from error
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hook = functools.partial(_after_init, module, source, originals)
    HookRegistry.register(HOOK_TARGET, hook, HookType.AFTER)


def read_source(file: Path) -> sglang_source.Backend:
    """The parsed backend file; Mismatch unless every expectation about it holds."""
    return sglang_source.Backend(file.read_text("utf-8"), str(file))


def versions_sentence() -> str:
    """Names the installed SGLang and the supported ones."""
    return (
        f"SGLang {installed.version('sglang') or 'of unknown version'} is installed, "
        f"supported is {', '.join(SUPPORTED)}."
    )


def _functions(module: types.ModuleType) -> dict:
    """The four functions as the classes hold them now, by (class, name)."""
    return {
        (class_name, name): vars(getattr(module, class_name)).get(name)
        for class_name, name in (*sglang_source.RUNNERS, *sglang_source.PLANNERS)
    }


def _check_loaded(functions: dict, source: sglang_source.Backend) -> None:
    """Refuse when what is loaded is not what the file says."""
    for target, function in functions.items():
        if getattr(function, "__code__", None) != source.code(target):
            raise Refused(
                f"{'.'.join(target)} is not the function in {source.filename}, "
                "something else has changed it."
            )


def _after_init(module, source, originals, result, backend, *args, **kwargs) -> None:
    """The AFTER hook: `backend` is a constructed FlashInferMLAAttnBackend."""
    # FlashMLA's and TRT-LLM's backends inherit from it and have FP8 paths of their own.
    if type(backend) is not getattr(module, sglang_source.BACKEND):
        return
    try:
        _install(module, source, originals, backend)
    except Exception as error:  # SGLang has to serve, with its cast
        _say(logging.WARNING, f"SGLang keeps its cast: {_sentence(error)}")


def _install(module, source, originals, backend) -> None:
    import torch

    if _functions(module) != originals:
        raise Refused("another plug-in has changed the FlashInfer MLA backend.")
    kv_dtype = backend.token_to_kv_pool.dtype
    if kv_dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        _say(
            logging.INFO,
            f"nothing to do: the KV cache is {kv_dtype}, not float8_e4m3fn or float8_e5m2.",
        )
        return

    updaters = [backend.indices_updater_decode]
    if not backend.skip_prefill:  # a draft backend has no prefill updater
        updaters.append(backend.indices_updater_prefill)
    objects = {type(item).__name__: item for item in (backend, *updaters)}
    targets = [target for target in originals if target[0] in objects]
    if len(targets) != len(sglang_source.RUNNERS) + len(updaters):
        raise Refused(f"the backend consists of unexpected classes, {', '.join(objects)}.")
    cache = _one_layer(backend.token_to_kv_pool, kv_dtype, updaters[0])
    for updater in updaters:
        _try_kernel(backend, updater, cache)

    methods = {target: source.rebuild(target, vars(module), kv_dtype) for target in targets}
    for (class_name, name), function in methods.items():
        item = objects[class_name]
        setattr(item, name, types.MethodType(function, item))
    _say(logging.INFO, _active_sentence(cache, updaters[0]))


def _one_layer(pool, kv_dtype, updater):
    """The cache tensor of one layer, checked to be plain rows of FP8 latents."""
    pool = getattr(pool, "full_kv_pool", pool)  # hybrid models: the layers that have attention
    cache = pool.get_key_buffer(pool.start_layer)
    row = updater.kv_lora_rank + updater.qk_rope_head_dim
    if cache.dtype != kv_dtype or tuple(cache.shape[1:]) != (1, row):
        raise Refused(
            f"the KV cache must hold rows of {row} {kv_dtype} values, [slots, 1, {row}], "
            f"got {cache.dtype} {list(cache.shape)}."
        )
    return cache


_tried: dict[tuple, str | None] = {}


def _try_kernel(backend, updater, cache) -> None:
    """Plan and run one token; Refused with FlashInfer's own words.

    The verdict is kept for the process: every draft step's backend asks again.
    """
    causal = hasattr(updater, "q_data_type")  # the prefill updater plans causal, decode does not
    shape = (updater.num_local_heads, updater.kv_lora_rank, updater.qk_rope_head_dim)
    key = (cache.device, cache.dtype, updater.data_type, cache.stride(), shape, causal)
    if key not in _tried:
        try:
            _run_one_token(backend, updater, cache, shape, causal)
            _tried[key] = None
        except Exception as error:
            _tried[key] = f"FlashInfer refused it: {_sentence(error)}"
    if reason := _tried[key]:
        raise Refused(reason)


def _run_one_token(backend, updater, cache, shape, causal) -> None:
    import torch

    heads, ckv, kpe = shape
    _log.debug("mla_fp8kv: trying the kernel on one token; a first start compiles it.")
    integers = {"dtype": torch.int32, "device": cache.device}
    wrapper = type(backend.decode_wrapper)(backend.workspace_buffer, backend="auto")
    wrapper.plan(
        torch.tensor([0, 1], **integers),
        torch.tensor([0, 1], **integers),
        torch.zeros(1, **integers),
        torch.ones(1, **integers),
        heads,
        ckv,
        kpe,
        1,
        causal,
        updater.scaling,
        updater.data_type,
        cache.dtype,
    )
    query = torch.zeros(1, heads, ckv + kpe, dtype=updater.data_type, device=cache.device)
    # One row with the pool's strides, not the pool's own: its memory may not be backed yet.
    row = torch.empty_strided(
        (1, 1, ckv + kpe), cache.stride(), dtype=torch.uint8, device=cache.device
    )
    row = row.zero_().view(cache.dtype)
    wrapper.run(query[..., :ckv], query[..., ckv:], row[..., :ckv], row[..., ckv:]).cpu()


def _active_sentence(cache, updater) -> str:
    import torch

    device = str(cache.device)
    if cache.is_cuda:
        major, minor = torch.cuda.get_device_capability(cache.device)
        device = f"{torch.cuda.get_device_name(cache.device)} (sm_{major}{minor})"
    version = installed.version("sglang")
    known = "" if version in SUPPORTED else " (untested version, every expectation holds)"
    return (
        f"active on {device}: the {cache.dtype} KV cache is read as it is, "
        f"{updater.num_local_heads} heads of {updater.data_type}; hooked "
        "forward_decode, forward_extend and call_begin_forward of "
        f"{sglang_source.BACKEND} in SGLang {version}{known}."
    )


def _sentence(error: Exception) -> str:
    """First line of an error, with its type where it is not one of ours."""
    line = (str(error).strip().splitlines() or ["no message"])[0]
    expected = isinstance(error, (Refused, sglang_source.Mismatch))
    return line if expected else f"{type(error).__name__}: {line}"


def _say(level: int, message: str) -> None:
    """Log a line once a process."""
    if message not in _said:
        _said.add(message)
        _log.log(level, "mla_fp8kv: %s", message)
