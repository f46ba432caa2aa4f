"""Imports a few real SGLang files where SGLang cannot be installed (a server without network).

`bench/pack_sglang.py` copies the FILES below from an installed SGLang. `activate` puts that folder
on sys.path; every other module of SGLang, and third-party packages that are missing, become empty
stand-ins: their attributes are stand-ins too, false in a condition, and leave what they decorate
as it is. What the real files need for a plain single-GPU server is in ANSWERS.
"""

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace

FILES = (
    "srt/environ.py",
    "srt/layers/attention/base_attn_backend.py",
    "srt/layers/attention/flashinfer_mla_backend.py",
    "srt/mem_cache/memory_pool.py",
    "srt/mem_cache/utils.py",
    "srt/model_executor/forward_batch_info.py",
    "srt/plugins/__init__.py",
    "srt/plugins/hook_registry.py",
    "srt/speculative/spec_info.py",
    "kernels/ops/kvcache/mla_buffer.py",
)
_THIRD_PARTY = ("msgspec", "psutil", "zmq", "orjson", "sgl_kernel", "pybase64")


class _Kind(abc.ABCMeta):
    """Type of the stand-ins: any attribute, any call, any subclass."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _make(name)

    def __call__(cls, *args, **kwargs):
        if not cls.__dict__.get("_is_stand_in"):
            return super().__call__(*args, **kwargs)  # a real class that inherits from one
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # as a decorator
        return cls

    def __bool__(cls):
        return False

    def __iter__(cls):
        return iter(())

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __getitem__(cls, item):
        return cls

    def __enter__(cls):
        return cls

    def __exit__(cls, *exception):
        return None


def _make(name):
    return _Kind(name, (), {"_is_stand_in": True})


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = ANSWERS.get(self.__name__, {}).get(name)
        if value is None:
            value = _make(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on sys.meta_path, so only for what nobody else finds."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in ("sglang", *_THIRD_PARTY):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


_buffers: dict = {}


def _buffer(name, factory):
    if name not in _buffers:
        _buffers[name] = factory()
    return _buffers[name]


_PARALLEL = SimpleNamespace(
    attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False, dcp_size=1, dcp_rank=0
)
_CONFIG = {
    "get_buffer": _buffer,
    "get_parallel": lambda: _PARALLEL,
    "get_disagg": lambda: SimpleNamespace(disaggregation_mode="null"),
    "get_schedule": lambda: SimpleNamespace(disable_chunked_prefix_cache=False, page_size=1),
    "get_exec": lambda: SimpleNamespace(
        kernel=SimpleNamespace(flashinfer_mla_disable_ragged=False)
    ),
}
_UTILS = {
    "is_flashinfer_available": lambda: importlib.util.find_spec("flashinfer") is not None,
    "get_cuda_graph_max_batch_size": lambda size: size,
    "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
    "is_cuda": lambda: True,
    "get_bool_env_var": lambda *_: False,
}
ANSWERS = {
    "sglang.srt.runtime_context": _CONFIG,
    "sglang.srt.utils": _UTILS,
    "sglang.srt.utils.common": _UTILS,
    "sglang.srt.layers.dcp": {"update_local_kv_lens_for_dcp": lambda lengths: None},
    "sglang.srt.constants": {"GPU_MEMORY_TYPE_KV_CACHE": "kv_cache"},
    "sglang.srt.platforms": {
        "current_platform": SimpleNamespace(capabilities=SimpleNamespace(supports_triton=True))
    },
}


def activate(folder: Path) -> None:
    """Make `import sglang` find the packed files in `folder`."""
    sys.path.insert(0, str(folder))
    sys.meta_path.append(_Finder())
