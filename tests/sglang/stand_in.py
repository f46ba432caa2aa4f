"""Just enough around SGLang's real FlashInferMLAAttnBackend to run it without a server.

Real: the backend class and its updaters, MLATokenToKVPool, the published configuration. Stood in
for: the model runner, the request table's gather, the verify input, and, where there is no GPU,
FlashInfer's wrappers. Shapes are DeepSeek's: q [tokens, heads, 576], cache [slots, 1, 576].
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CKV, KPE = 512, 64
ROW = CKV + KPE
SCALE = 1 / math.sqrt(192)


class OnCpu(TorchFunctionMode):
    """SGLang names the device "cuda" and pins memory in places; here both mean plain CPU memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class PoolSpy(TorchDispatchMode):
    """Records every operation that widens a pool's own 8-bit memory to a float tensor."""

    def __init__(self, pool):
        super().__init__()
        self._pool = {buffer.untyped_storage().data_ptr() for buffer in pool.kv_buffer}
        self.casts: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        reads_pool = any(
            isinstance(item, torch.Tensor)
            and item.itemsize == 1
            and item.untyped_storage().data_ptr() in self._pool
            for item in itertools.chain(args, (kwargs or {}).values())
        )
        if reads_pool and isinstance(result, torch.Tensor):
            if result.is_floating_point() and result.itemsize > 1:
                self.casts.append(f"{func} -> {result.dtype} {list(result.shape)}")
        return result


class CpuMlaWrapper:
    """FlashInfer's BatchMLAPagedAttentionWrapper on the CPU: same calls, float32 attention.

    As FlashInfer does, it refuses a cache or a query whose dtype is not the planned one. All plans
    and runs of all wrappers are appended to the class lists `plans` and `runs`.
    """

    plans: list[SimpleNamespace] = []
    runs: list[SimpleNamespace] = []
    refuses_fp8: str | None = None  # the sentence of a kernel that does not take the shape

    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self._graph = use_cuda_graph
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        if kv_data_type.itemsize == 1 and self.refuses_fp8:
            raise ValueError(self.refuses_fp8)
        self.plans.append(
            SimpleNamespace(
                q=q_data_type,
                kv=kv_data_type,
                heads=num_heads,
                dims=(head_dim_ckv, head_dim_kpe),
                page_size=page_size,
                causal=causal,
                kv_len=kv_len_arr.tolist(),
            )
        )
        self._q_data_type, self._kv_data_type = q_data_type, kv_data_type
        self._causal, self._sm_scale = causal, sm_scale
        if self._graph:
            self._kv_indices_buf[: len(kv_indices)] = kv_indices
        else:
            self._kv_indices_buf = kv_indices
        self._cached_module = SimpleNamespace(plan=self._module_plan)
        self._module_plan(None, None, None, qo_indptr, kv_indptr, kv_len_arr, None, None, causal)

    def _module_plan(self, _float, _int, _pinned, qo_indptr, kv_indptr, kv_len, _heads, _dim, _c):
        """What SGLang calls by itself when it replays a graph."""
        self._host = (qo_indptr.tolist(), kv_indptr.tolist(), kv_len.tolist())

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, return_lse=False):
        for name, tensor, planned in (
            ("q_nope", q_nope, self._q_data_type),
            ("ckv_cache", ckv_cache, self._kv_data_type),
            ("kpe_cache", kpe_cache, self._kv_data_type),
        ):
            if tensor.dtype != planned:
                raise ValueError(f"{name} must be {planned} as planned, got {tensor.dtype}.")
        self.runs.append(
            SimpleNamespace(kv=ckv_cache.dtype, lse=return_lse, ptr=ckv_cache.data_ptr())
        )
        out = torch.empty_like(q_nope) if out is None else out
        lse = torch.full(q_nope.shape[:2], -math.inf)
        qo_indptr, kv_indptr, kv_len = self._host
        for request, length in enumerate(kv_len):
            rows = slice(qo_indptr[request], qo_indptr[request + 1])
            slots = self._kv_indices_buf[kv_indptr[request] :][:length].long()
            ckv, kpe = (_rows(cache, slots) for cache in (ckv_cache, kpe_cache))
            q = torch.cat([q_nope[rows], q_pe[rows]], dim=-1).float()
            scores = torch.einsum("thd,sd->ths", q, torch.cat([ckv, kpe], dim=-1)) * self._sm_scale
            if self._causal:
                tokens = q.shape[0]
                visible = (
                    torch.arange(length)[None] <= torch.arange(tokens)[:, None] + length - tokens
                )
                scores = scores.masked_fill(~visible[:, None], -math.inf)
            out[rows] = torch.einsum("ths,sd->thd", scores.softmax(-1), ckv).to(out.dtype)
            lse[rows] = scores.logsumexp(-1) / math.log(2)
        return (out, lse) if return_lse else out


class CpuModule:
    """A compiled MLA module's plan() and run() on the CPU, as FlashInfer's real wrapper calls them.

    As on the GPU, the integer workspace carries a plan: run() reads what the last plan() for its
    workspace wrote, whatever plan_info it is given.
    """

    def __init__(self):
        self.plans, self.runs = {}, 0

    def plan(self, float_workspace, int_workspace, pinned, qo_indptr, kv_indptr, kv_len, *_):
        metadata = (qo_indptr, kv_indptr, kv_len)
        assert all(tensor.device.type == "cpu" for tensor in metadata)
        self.plans[int_workspace.data_ptr()] = tuple(tensor.clone() for tensor in metadata)
        return [0]

    def plan_with_staged_workspace_bytes(self, *arguments):
        """What 0.7 calls on upstream's modules."""
        return self.plan(*arguments), 0

    def forget(self, int_workspace):
        self.plans.pop(int_workspace.data_ptr(), None)

    def run(self, float_workspace, int_workspace, plan_info, q_nope, q_pe, ckv, kpe, *arguments):
        kv_indices, out, lse, mask_mode, heads, page_size, sm_scale = arguments[:7]
        assert (heads, page_size) == (q_nope.shape[1], 1)
        wrapper = CpuMlaWrapper(None)
        wrapper._q_data_type, wrapper._kv_data_type = q_nope.dtype, ckv.dtype
        wrapper._causal, wrapper._sm_scale = bool(mask_mode), sm_scale
        wrapper._kv_indices_buf = kv_indices
        qo_indptr, kv_indptr, kv_len = self.plans[int_workspace.data_ptr()]
        wrapper._module_plan(None, None, None, qo_indptr, kv_indptr, kv_len, None, None, None)
        wrapper.run(q_nope, q_pe, ckv, kpe, out=out)
        self.runs += 1


def _rows(cache, slots):
    """The rows [len(slots), width] of a [slots, 1, width] cache, widened after the gather."""
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return raw[slots].view(cache.dtype)[:, 0].float()


class RaggedWrapper:
    """Stands where SGLang constructs its ragged prefill wrapper, which these tests never run."""

    def __init__(self, *args, **kwargs):
        pass


class Translator:
    """SGLang's KVIndexTranslator for a plain pool: the request table's rows, packed."""

    needs_read_translate = False

    def __init__(self, req_to_token):
        self._table = req_to_token

    def pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out):
        packed = [
            self._table[row, :length]
            for row, length in zip(
                req_pool_indices[: len(seq_lens)].tolist(), seq_lens.tolist(), strict=True
            )
        ]
        packed = torch.cat(packed) if packed else out[:0]
        out[: len(packed)] = packed
        return False


def model_runner(
    pool, *, heads=8, requests=4, context=512, dtype=torch.bfloat16, device="cpu", seed=2
):
    """What the backend reads of a ModelRunner; requests have `context` random slots each."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pool.size, generator=generator)[: requests * context] + 1  # 0 is padding
    table = slots.reshape(requests, -1).to(torch.int32).to(device)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            context_len=table.shape[1],
            num_attention_heads=heads,
            kv_lora_rank=CKV,
            qk_nope_head_dim=128,
            qk_rope_head_dim=KPE,
            v_head_dim=128,
            scaling=SCALE,
        ),
        device=device,
        dtype=dtype,
        kv_cache_dtype=pool.dtype,
        page_size=1,
        req_to_token_pool=SimpleNamespace(size=requests, req_to_token=table),
        token_to_kv_pool=pool,
        kv_index_translator=Translator(table),
    )


def fill_pool(pool, seed=0):
    """Random finite values in every layer of a real MLATokenToKVPool."""
    device = pool.kv_buffer[0].device
    generator = torch.Generator(device).manual_seed(seed)
    for buffer in pool.kv_buffer:
        values = torch.randn(buffer.shape, generator=generator, device=device).to(pool.dtype)
        buffer.copy_(values.view(buffer.dtype) if buffer.dtype == torch.uint8 else values)


def layer(heads=8, layer_id=0):
    """What the backend reads of a RadixAttention layer."""
    return SimpleNamespace(
        layer_id=layer_id,
        tp_q_head_num=heads,
        tp_k_head_num=1,
        tp_v_head_num=1,
        head_dim=ROW,
        v_head_dim=CKV,
        scaling=SCALE,
        logit_cap=0.0,
        is_cross_attention=False,
    )


def batch(mode, seq_lens, *, device="cpu", prefix_lens=None, spec_info=None, tokens=None):
    """A ForwardBatch as far as the backend reads it; request i uses row i of the request table."""
    lengths = torch.tensor(seq_lens, dtype=torch.int64)
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(seq_lens),
        req_pool_indices=torch.arange(len(seq_lens), device=device),
        seq_lens=lengths.to(device),
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        positions=torch.zeros(tokens or len(seq_lens), dtype=torch.int64, device=device),
        spec_info=spec_info,
        kv_loc_plan=None,
        extend_prefix_lens=None
        if prefix_lens is None
        else torch.tensor(prefix_lens, dtype=torch.int64, device=device),
        extend_prefix_lens_cpu=prefix_lens,
        attn_dcp_metadata=None,
        attn_attend_prefix_cache=None,
    )


def verify_input(draft_tokens):
    """A verify step's SpecInput: `draft_tokens` new queries a request, their KV already stored."""
    from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

    class VerifyInput(SpecInput):
        draft_token_num = num_tokens_per_req = draft_tokens

        def generate_attn_arg_prefill(
            self, *, req_pool_indices, paged_kernel_lens, translator, plan, **_
        ):
            lengths = paged_kernel_lens + draft_tokens
            device = lengths.device
            kv_indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
            kv_indptr[1:] = lengths.cumsum(0)
            kv_indices = torch.empty(int(lengths.sum()), dtype=torch.int32, device=device)
            translator.pack_read_stream(
                plan,
                req_pool_indices=req_pool_indices,
                seq_lens=lengths,
                indptr=kv_indptr,
                out=kv_indices,
            )
            qo_indptr = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
            return kv_indices, kv_indptr, qo_indptr * draft_tokens, None

    return VerifyInput(SpecInputType.EAGLE_VERIFY)
