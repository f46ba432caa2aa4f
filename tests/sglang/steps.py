"""The steps a server takes through the backend, each returning what attention returned."""

import stand_in
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

HEADS = 8


def queries(tokens, heads=HEADS, dtype=torch.bfloat16, seed=1):
    """Random q [tokens, heads * 576]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads * stand_in.ROW, generator=generator).to(dtype)


def _run(forward, tokens, batch, layer_id, dtype):
    layer = stand_in.layer(HEADS, layer_id)
    q = queries(tokens, dtype=dtype)
    return forward(q, None, None, layer, batch, save_kv_cache=False)


def decode(backend, seq_lens=(5, 300, 17), layer_id=0, dtype=torch.bfloat16):
    """One eager decode step, one query a request."""
    batch = stand_in.batch(ForwardMode.DECODE, list(seq_lens))
    backend.init_forward_metadata(batch)
    return _run(backend.forward_decode, len(seq_lens), batch, layer_id, dtype)


def extend(backend, prefix_lens=(3, 200), new=(4, 9), layer_id=0, dtype=torch.bfloat16):
    """Chunked prefill behind a cached prefix: the paged wrapper."""
    seq_lens = [prefix + tokens for prefix, tokens in zip(prefix_lens, new, strict=True)]
    batch = stand_in.batch(ForwardMode.EXTEND, seq_lens, prefix_lens=list(prefix_lens))
    backend.init_forward_metadata(batch)
    return _run(backend.forward_extend, sum(new), batch, layer_id, dtype)


def verify(backend, seq_lens=(12, 250), draft_tokens=4, layer_id=0, dtype=torch.bfloat16):
    """Speculative verify of `draft_tokens` tokens a request."""
    spec = stand_in.verify_input(draft_tokens, None)
    batch = stand_in.batch(ForwardMode.TARGET_VERIFY, list(seq_lens), spec_info=spec)
    backend.init_forward_metadata(batch)
    return _run(backend.forward_extend, len(seq_lens) * draft_tokens, batch, layer_id, dtype)


def graph_decode(backend, captured=(1, 1), replayed=((5, 70), (6, 71)), layer_id=0):
    """Decode's capture-time plan, then the plans that SGLang's replay makes by itself."""
    requests = len(captured)
    backend.init_cuda_graph_state(requests, requests)
    batch = stand_in.batch(ForwardMode.DECODE, list(captured))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    outputs = [_run(backend.forward_decode, requests, batch, layer_id, torch.bfloat16)]
    for seq_lens in replayed:
        batch = stand_in.batch(ForwardMode.DECODE, list(seq_lens))
        backend.init_forward_metadata_out_graph(batch)
        outputs.append(_run(backend.forward_decode, requests, batch, layer_id, torch.bfloat16))
    return torch.stack(outputs)


def graph_verify(backend, captured=(1, 1), replayed=((9, 70),), draft_tokens=4, layer_id=0):
    """The same for verify, whose replay copies its metadata into the capture's buffers."""
    requests = len(captured)
    tokens = requests * draft_tokens
    backend.init_cuda_graph_state(requests, tokens)
    outputs = []
    for index, seq_lens in enumerate((captured, *replayed)):
        spec = stand_in.verify_input(draft_tokens, None)
        batch = stand_in.batch(
            ForwardMode.TARGET_VERIFY, list(seq_lens), spec_info=spec, tokens=tokens
        )
        backend.init_forward_metadata_out_graph(batch, in_capture=index == 0)
        outputs.append(_run(backend.forward_extend, tokens, batch, layer_id, torch.bfloat16))
    return torch.stack(outputs)


ALL = {
    "decode": decode,
    "extend": extend,
    "verify": verify,
    "graph decode": graph_decode,
    "graph verify": graph_verify,
}
