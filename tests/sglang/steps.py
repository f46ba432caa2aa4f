"""The steps a server takes through the backend, each returning what attention returned.

With `write`, new tokens' KV goes through SGLang's pool first and the query comes in two parts, as
DeepSeek's absorbed attention passes them; that needs a GPU. Without, the query is one tensor.
"""

import stand_in
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

HEADS = 8


def queries(tokens, heads=HEADS, dtype=torch.bfloat16, seed=1, device="cpu"):
    """Random q [tokens, heads * 576]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads * stand_in.ROW, generator=generator).to(device, dtype)


class Step:
    """One forward pass: its batch, and the query that each layer gets."""

    def __init__(self, backend, batch, tokens, new_slots=None, heads=HEADS, dtype=torch.bfloat16):
        self.backend, self.batch = backend, batch
        self.heads = heads
        self.q = queries(tokens, heads, dtype, device=backend.device)
        self._forward = (
            backend.forward_decode
            if batch.forward_mode.is_decode_or_idle()
            else backend.forward_extend
        )
        self._new = None
        if new_slots is not None:
            batch.out_cache_loc = new_slots.long()
            batch.out_cache_loc_is_physical = False
            kv = queries(tokens, 1, dtype, seed=3, device=backend.device).unsqueeze(1)
            self._new = kv[..., : stand_in.CKV], kv[..., stand_in.CKV :]
            q = self.q.view(-1, heads, stand_in.ROW).split([stand_in.CKV, stand_in.KPE], -1)
            self._q_parts = [part.contiguous() for part in q]

    def attention(self, layer_id=0):
        """[tokens, heads * 512]"""
        layer = stand_in.layer(self.heads, layer_id)
        if self._new is None:
            return self._forward(self.q, None, None, layer, self.batch, save_kv_cache=False)
        q_nope, q_rope = self._q_parts
        k_nope, k_rope = self._new
        return self._forward(
            q_nope, k_nope, k_nope, layer, self.batch, True, q_rope=q_rope, k_rope=k_rope
        )


def _table(backend):
    return backend.req_to_token_pool.req_to_token


def decode_step(backend, seq_lens=(5, 300, 17), write=False, **options):
    """One query a request, the last of its tokens."""
    batch = stand_in.batch(ForwardMode.DECODE, list(seq_lens), device=backend.device)
    rows, last = list(range(len(seq_lens))), [n - 1 for n in seq_lens]
    slots = _table(backend)[rows, last] if write else None
    return Step(backend, batch, len(seq_lens), slots, **options)


def extend_step(backend, prefix_lens=(3, 200), new=(4, 9), write=False, **options):
    """Chunked prefill behind a cached prefix: the paged wrapper."""
    seq_lens = [prefix + tokens for prefix, tokens in zip(prefix_lens, new, strict=True)]
    batch = stand_in.batch(
        ForwardMode.EXTEND, seq_lens, prefix_lens=list(prefix_lens), device=backend.device
    )
    ranges = zip(prefix_lens, seq_lens, strict=True)
    slots = [_table(backend)[row, a:b] for row, (a, b) in enumerate(ranges)]
    return Step(backend, batch, sum(new), torch.cat(slots) if write else None, **options)


def verify_step(backend, seq_lens=(12, 250), draft_tokens=4, write=False, **options):
    """Speculative verify of `draft_tokens` tokens a request behind its `seq_lens` tokens."""
    tokens = len(seq_lens) * draft_tokens
    batch = stand_in.batch(
        ForwardMode.TARGET_VERIFY,
        list(seq_lens),
        spec_info=stand_in.verify_input(draft_tokens),
        tokens=tokens,
        device=backend.device,
    )
    slots = [_table(backend)[row, n : n + draft_tokens] for row, n in enumerate(seq_lens)]
    return Step(backend, batch, tokens, torch.cat(slots) if write else None, **options)


def draft_extend_step(backend, prefix_lens=(12, 250), draft_tokens=4, write=False, **options):
    """The draft model's extend after a verify: its plan gets host arrays, by a path of its own."""
    new = [draft_tokens] * len(prefix_lens)
    step = extend_step(backend, prefix_lens, new, write, **options)
    step.batch.forward_mode = ForwardMode.DRAFT_EXTEND_V2
    step.batch.spec_info = stand_in.verify_input(draft_tokens)
    return step


def _eager(make_step):
    def run(backend, *args, layer_id=0, **options):
        step = make_step(backend, *args, **options)
        backend.init_forward_metadata(step.batch)
        return step.attention(layer_id)

    return run


decode, extend, verify, draft_extend = map(
    _eager, (decode_step, extend_step, verify_step, draft_extend_step)
)


def _replayed(make_step, tokens_per_request, lengths):
    """The capture-time plan, then the plans that SGLang's graph replay makes by itself."""

    def run(backend, layer_id=0):
        requests = len(lengths[0])
        backend.init_cuda_graph_state(requests, requests * tokens_per_request)
        outputs = []
        for index, seq_lens in enumerate(lengths):
            step = make_step(backend, seq_lens)
            backend.init_forward_metadata_out_graph(step.batch, in_capture=index == 0)
            outputs.append(step.attention(layer_id))
        return torch.stack(outputs)

    return run


ALL = {
    "decode": decode,
    "extend": extend,
    "verify": verify,
    "draft extend": draft_extend,
    "graph decode": _replayed(decode_step, 1, ((1, 1), (5, 70), (6, 71))),
    "graph verify": _replayed(verify_step, 4, ((1, 1), (9, 70))),
}
