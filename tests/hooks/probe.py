"""Prints, as JSON, what a FlashInfer tree does for MLA plans that are none of ours.

Run with the tree on PYTHONPATH. Paths inside the tree and addresses are left out of the answers.
"""

import hashlib
import itertools
import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))

import stand_ins  # noqa: E402
from flashinfer_base import FLAT  # noqa: E402

warnings.simplefilter("ignore")

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
INT32 = torch.int32
KEYS = {
    f"{backend} {q} {kv} {ckv} {kpe} {profiler}": (backend, q, kv, q, INT32, ckv, kpe, profiler)
    for backend, q, kv, (ckv, kpe), profiler in itertools.product(
        ("fa2", "fa3"), (BF16, FP16), (BF16, FP16, E4M3), ((512, 64), (512, 0)), (False, True)
    )
}


def specs():
    """Name, sources by content, flags and include directories of each module's specification."""
    from flashinfer.jit.attention.modules import gen_batch_mla_module

    answers = {}
    for label, key in KEYS.items():
        spec = gen_batch_mla_module(*key)
        files = sorted([*spec.sources, *Path(spec.sources[0]).parent.glob("*.inc")])
        answers[label] = [
            spec.name,
            [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files],
            spec.extra_cflags,
            spec.extra_cuda_cflags,
            spec.extra_include_dirs,
            type(getattr(spec, "post_load_adapter", None)).__name__,
        ]
    return answers


def uris():
    """Cache keys of the MLA modules, those of FP8 included."""
    from flashinfer.jit.attention.modules import get_batch_mla_uri

    return {label: get_batch_mla_uri(*key) for label, key in KEYS.items()}


def describe(value):
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), list(value.shape), list(value.stride())]
    return value


class Recorder:
    def __init__(self, *key):
        self.log = [[str(part) for part in key]]

    def plan(self, *args):
        self.log.append(["plan", *map(describe, args)])
        return [1, 2, 3]

    def plan_with_staged_workspace_bytes(self, *args):
        return self.plan(*args), 16

    def run(self, *args):
        self.log.append(["run", *map(describe, args)])


def pretend(sm):
    """Stand-ins for the device and the compiled modules; returns the list of modules made."""
    made = []

    def module(*key):
        made.append(Recorder(*key))
        return made[-1]

    for place, name, value in stand_ins.upstream(lambda: sm, module):
        setattr(place, name, value)
    return made


def call(backend, q, kv, causal, scales):
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    def int32(*values):
        return torch.tensor(values, dtype=INT32)

    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(1 << 25, dtype=torch.uint8), backend=backend
    )
    wrapper.plan(
        int32(0, 1, 4), int32(0, 5, 12), torch.arange(12, dtype=INT32), int32(5, 7),
        8, 512, 64, 1, causal, 0.1, q, kv,
    )  # fmt: skip
    query = torch.zeros(4, 8, 576, dtype=q)
    pool = torch.zeros(64, 1, 576 * kv.itemsize, dtype=torch.uint8).view(kv)
    tensors = query[..., :512], query[..., 512:], pool[..., :512], pool[..., 512:]
    out = wrapper.run(*tensors, **scales)
    attributes = [describe(getattr(wrapper, name, "absent")) for name in (
        "_int_workspace_buffer", "_kv_indices_buf", "_plan_info", "_causal", "_page_size",
        "_backend", "_planned_backend_name",
    )]  # fmt: skip
    planned = getattr(wrapper, "_planned_backend", None)
    return [describe(out), attributes, type(planned).__name__]


def calls():
    """What 16-bit plans, and FP8 plans of an explicit FA3 on 0.7, hand to the compiled modules.

    Also the modules of ours that were imported by the time the 16-bit plans were through.
    """
    answers = {}
    sixteen = itertools.product(("auto", "fa2", "fa3"), (BF16, FP16), (False, True))
    wanted = [(backend, q, q, causal, {}) for backend, q, causal in sixteen]
    fp8 = [
        ("fa3", BF16, E4M3, False, {"ckv_scale": 0.5, "kpe_scale": 2.0}),
        ("fa3", BF16, E4M3, True, {"ckv_scale_arr": torch.ones(64, 1, 4), "kpe_scale": 2.0}),
    ]
    for sm in ((9, 0), (8, 6), (12, 0)):
        for arguments in wanted:
            if arguments[0] != "fa3" or sm == (9, 0):
                record(answers, sm, arguments)
    imported = sorted(name for name in sys.modules if name.startswith("mla_fp8kv"))
    for arguments in [] if FLAT else fp8:
        record(answers, (9, 0), arguments)
    return answers, imported


def record(answers, sm, arguments):
    made = pretend(sm)
    result = call(*arguments)
    label = f"{sm} {[str(part) for part in arguments[:4]]}"
    answers[label] = [sm, result, [module.log for module in made]]


def refusals():
    """Sentences of 16-bit and explicit-FA3 plans that upstream refuses; 0.6 refuses nothing."""
    if FLAT:
        return {}
    pretend((9, 0))
    answers = {}
    for label, arguments in {
        "fa3 without scales": ("fa3", BF16, E4M3, False, {}),
        "fa3 fp16": ("fa3", FP16, E4M3, False, {}),
        "fa3 e5m2": ("fa3", BF16, E5M2, False, {}),
        "scales for bf16": ("fa2", BF16, BF16, False, {"ckv_scale": 1.0}),
        "mixed": ("fa2", FP16, BF16, False, {}),
    }.items():
        try:
            call(*arguments)
            answers[label] = "accepted"
        except ValueError as error:
            answers[label] = str(error)
    return answers


def main():
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    answers = {"uris": uris(), "specs": specs()}
    answers["calls"], answers["imported"] = calls()
    answers["refusals"] = refusals()
    print(json.dumps(answers, default=str))


main()
