"""Edited copies of SGLang's backend file: what is not as expected is refused, in one line."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang", reason="needs the sglang environment: ./build.sh test --sglang")

import steps  # noqa: E402
from mla_fp8kv import installed  # noqa: E402
from test_plugin import HOOKED, backend_of, functions, replaced  # noqa: E402

# name: (pattern, replacement of its first match, what the line must say)
EDITS = {
    "no cast in decode": (
        r"(k_buffer = .*)\.to\(q\.dtype\)",
        r"\1",
        "forward_decode uses the KV cache other than by .to(q.dtype)",
    ),
    "another target dtype": (
        r"(k_buf = .*get_key_buffer.*)\.to\(q\.dtype\)",
        r"\1.to(torch.float16)",
        "forward_extend uses the KV cache other than by .to(q.dtype)",
    ),
    "a scale on the cache": (
        r"( +)(k_buffer = .*\n)",
        r"\1\2\1k_buffer = k_buffer * 2\n",
        "uses k_buffer other than by slices for run()",
    ),
    "a new argument of run": (
        r"(k_buf\[.*:\],\n +out=o,)",
        r"\1 ckv_scale=2.0,",
        "calls run() with unexpected arguments",
    ),
    "gathered cache kept": (
        r"dcp_kv_buffer\.to\(",
        "dcp_kv_buffer.contiguous().to(",
        "forward_extend uses the KV cache other than by .to(q.dtype)",
    ),
    "another query dtype": (
        r"(class \w+UpdaterDecode:[\s\S]*?self\.data_type = model_runner\.)dtype",
        r"\1kv_cache_dtype",
        "UpdaterDecode is expected to plan with model_runner.dtype",
    ),
    "one plan argument more": (
        r"(self\.data_type,\n +self\.data_type,\n)",
        r"\1False,\n",
        "plans with unexpected arguments",
    ),
    "the dtype used elsewhere": (
        r"\n( +)(sm_scale = self\.scaling\n)",
        r"\n\1\2\1assert self.data_type\n",
        "uses self.data_type outside plan calls",
    ),
    "the cache read elsewhere": (
        r"\n( +)(def get_cuda_graph_seq_len_fill_value.*\n)",
        r"\n\1\2\1    self.token_to_kv_pool.get_key_buffer(0)\n",
        "get_key_buffer is read in an unexpected place",
    ),
    "a renamed method": (
        "def call_begin_forward",
        "def plan_all",
        "UpdaterDecode.call_begin_forward is expected once, found 0 times",
    ),
    "a call of super()": (
        r"\n( +)(decode_wrapper = self\.forward_metadata.*\n)",
        r"\n\1\2\1super().__class__\n",
        "forward_decode is expected to use neither super() nor private names",
    ),
    "a private name": (
        r"\n( +)(decode_wrapper = self\.forward_metadata.*\n)",
        r"\n\1\2\1self.__private = 1\n",
        "forward_decode is expected to use neither super() nor private names",
    ),
    "a decorator": (
        "( +)def forward_decode",
        r"\1@torch.no_grad()\n\1def forward_decode",
        "forward_decode is expected to have no decorator",
    ),
}


def edit(module, pattern, replacement):
    text, found = re.subn(pattern, replacement, Path(module.__file__).read_text("utf-8"), count=1)
    assert found, "the edit no longer finds its place"
    return text


@pytest.fixture
def version_0_5_99(monkeypatch):
    known = installed.version
    monkeypatch.setattr(
        installed, "version", lambda name: "0.5.99" if name == "sglang" else known(name)
    )


@pytest.mark.parametrize("name", EDITS)
def test_edited_file_is_refused(module, edited_module, load, said, name):
    pattern, replacement, reason = EDITS[name]
    edited = edited_module(edit(module, pattern, replacement))
    init = edited.FlashInferMLAAttnBackend.__init__
    before = functions(edited)
    load()
    assert functions(edited) == before and edited.FlashInferMLAAttnBackend.__init__ is init
    ((level, line),) = said()
    assert level == "WARNING" and reason in line, line
    assert "SGLang 0.5.23 is installed, supported is 0.5.23" in line


def test_harmless_edit_of_another_version(module, edited_module, load, pool, said, version_0_5_99):
    """Every expectation holds, so it works, and the line says that the version is not known."""
    edited = edited_module(
        edit(module, "class DecodeMetadata", "# moved\n\n\nclass DecodeMetadata")
    )
    load()
    backend = backend_of(edited, pool())
    assert replaced(backend) == {(name, method) for name, each in HOOKED.items() for method in each}
    steps.decode(backend)
    ((_, line),) = said()
    assert "SGLang 0.5.99 (untested version, every expectation holds)" in line


def test_other_version_with_other_code(module, edited_module, load, said, version_0_5_99):
    edited_module(edit(module, *EDITS["no cast in decode"][:2]))
    load()
    ((_, line),) = said()
    assert line.endswith("SGLang 0.5.99 is installed, supported is 0.5.23.")
