"""Runs SGLang 0.5.9's backend file: python run_0_5_9.py FOLDER [flashinfer [cuda]], prints JSON.

FOLDER holds the file as sglang/<path>, as released or patched; a process of its own, because
another SGLang may be installed. Stood in for: everything else of SGLang, and FlashInfer's wrappers;
with the second word, only the modules behind its MLA wrapper; with the third, nothing of its.
"""

import importlib
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import slim_sglang
import stand_in
import torch

HEADS, SLOTS, CONTEXT = 8, 2048, 512


class GatherIndices:
    """In the place of the Triton kernel create_flashinfer_kv_indices_triton."""

    def __getitem__(self, grid):
        return self

    def __call__(self, table, rows, lengths, indptr, start, out, stride):
        for row, length, first in zip(
            rows.tolist(), lengths.tolist(), indptr.tolist(), strict=False
        ):
            out[first : first + length] = table[row, :length]


def answers() -> dict:
    """What a plain single-GPU server of 0.5.9 says."""
    arguments = SimpleNamespace(
        disaggregation_mode="null",
        disable_chunked_prefix_cache=False,
        flashinfer_mla_disable_ragged=False,
    )
    workspace = SimpleNamespace(get=lambda: 128 << 20)
    off = SimpleNamespace(get=lambda: False)
    return {
        "sglang.srt.server_args": {"get_global_server_args": lambda: arguments},
        "sglang.srt.layers.dp_attention": {"get_attention_tp_size": lambda: 1},
        "sglang.srt.layers.attention.flashinfer_backend": {
            "create_flashinfer_kv_indices_triton": GatherIndices()
        },
        "sglang.srt.environ": {
            "envs": SimpleNamespace(
                SGLANG_FLASHINFER_WORKSPACE_SIZE=workspace, SGLANG_ENABLE_TORCH_COMPILE=off
            )
        },
        "sglang.srt.utils": {"is_flashinfer_available": lambda: False},
    }


class Pool:
    """MLATokenToKVPool as far as the file reads it."""

    def __init__(self, dtype, device, width=stand_in.ROW):
        self.dtype, self.size, self.kv_cache_dim = dtype, SLOTS, width
        buffer = torch.zeros(SLOTS + 1, 1, width, dtype=dtype, device=device)
        self.kv_buffer = [buffer.view(torch.uint8) if dtype.itemsize == 1 else buffer]
        stand_in.fill_pool(self)

    def get_key_buffer(self, layer_id):
        return self.kv_buffer[layer_id].view(self.dtype)


class Mode(SimpleNamespace):
    def __getattr__(self, name):
        return lambda: name == self.is_true


def real_wrapper() -> tuple[type, dict]:
    """FlashInfer's own wrapper, and the modules it has asked for by KV dtype."""
    import flashinfer.mla
    import mla_fp8kv.capability
    import mla_fp8kv.jit

    made: dict = {}

    def get_module(kv_dtype):
        return made.setdefault(str(kv_dtype), stand_in.CpuModule())

    mla_fp8kv.capability.compute_capability = lambda _: (8, 9)
    mla_fp8kv.jit.get_module = lambda kv_dtype, kpe: get_module(kv_dtype)
    flashinfer.mla.determine_mla_backend = lambda _: "fa2"
    flashinfer.mla.get_batch_mla_module = lambda backend, q, kv, *_: get_module(kv)
    return flashinfer.mla.BatchMLAPagedAttentionWrapper, made


def graph_decode(backend, batch, forward):
    """Captured for short requests, planned by SGLang itself for the batch, and replayed."""
    requests = len(batch.seq_lens)
    backend.init_cuda_graph_state(requests, requests)
    mode = Mode(is_true="is_decode_or_idle")
    common = {"bs": requests, "encoder_lens": None, "forward_mode": mode, "spec_info": None}
    backend.init_forward_metadata_capture_cuda_graph(
        num_tokens=requests,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=torch.ones_like(batch.seq_lens),
        **common,
    )
    on_gpu = batch.seq_lens.is_cuda
    if on_gpu:
        forward()  # loads what is lazy
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = forward()
    backend.init_forward_metadata_replay_cuda_graph(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu.int(),
        **common,
    )
    if not on_gpu:
        return forward()
    graph.replay()
    return output


def eager(backend, batch, forward):
    backend.init_forward_metadata(batch)
    return forward()


def steps(module, pool, made) -> dict:
    """Casts of the pool, what was planned and run, and the outputs.

    The steps are decode, paged extend, and decode as a CUDA graph replays it.
    """
    device = pool.kv_buffer[0].device
    runner = stand_in.model_runner(pool, heads=HEADS, context=CONTEXT, device=device)
    backend = module.FlashInferMLAAttnBackend(runner)
    outputs = []
    with stand_in.PoolSpy(pool) as spy:
        for how, name, mode, tokens, lengths, prefixes in (
            (eager, "forward_decode", "is_decode_or_idle", 2, [5, 300], None),
            (eager, "forward_extend", "is_extend", 9, [7, 205], [3, 200]),
            (graph_decode, "forward_decode", "is_decode_or_idle", 2, [400, 9], None),
        ):
            batch = stand_in.batch(Mode(is_true=mode), lengths, prefix_lens=prefixes, device=device)
            batch.token_to_kv_pool, batch.out_cache_loc = pool, None
            generator = torch.Generator().manual_seed(1)
            q = torch.randn(tokens, HEADS * stand_in.ROW, generator=generator)
            arguments = (q.bfloat16().to(device), None, None, stand_in.layer(HEADS), batch)
            forward = partial(getattr(backend, name), *arguments, save_kv_cache=False)
            outputs.append(how(backend, batch, forward).float().flatten()[::97].tolist())
    wrapper = stand_in.CpuMlaWrapper
    found = {
        "casts": len(spy.casts),
        "planned": sorted({f"{plan.q} {plan.kv}" for plan in wrapper.plans}),
        "run": sorted({str(run.kv) for run in wrapper.runs}),
        "modules": sorted(made),
        "outputs": outputs,
    }
    made.clear()
    wrapper.plans.clear()
    wrapper.runs.clear()
    return found


def main(folder: str, wrapper: str = "stand-in", device: str = "cpu") -> None:
    slim_sglang.ANSWERS = answers()
    slim_sglang.activate(Path(folder))
    module = importlib.import_module("sglang.srt.layers.attention.flashinfer_mla_backend")
    made: dict = {}
    module.BatchMLAPagedAttentionWrapper = stand_in.CpuMlaWrapper
    if device == "cuda":
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        module.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    elif wrapper == "flashinfer":
        module.BatchMLAPagedAttentionWrapper, made = real_wrapper()
    module.BatchPrefillWithRaggedKVCacheWrapper = stand_in.RaggedWrapper
    pools = {
        "e4m3": Pool(torch.float8_e4m3fn, device),
        "e5m2": Pool(torch.float8_e5m2, device),
        "bf16": Pool(torch.bfloat16, device),
    }
    with stand_in.OnCpu() if device == "cpu" else nullcontext():
        found = {name: steps(module, pool, made) for name, pool in pools.items()}
    if hasattr(module, "mla_cache_dtype"):
        packed = stand_in.model_runner(Pool(torch.float8_e4m3fn, device, width=656))
        found["packed rows"] = str(module.mla_cache_dtype(packed))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
