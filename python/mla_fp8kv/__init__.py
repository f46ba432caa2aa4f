"""FP8 KV cache for MLA attention in FlashInfer: kernels, their JIT module, and the wrapper backend.

Importing this package imports nothing else; `mla_fp8kv.backend` and `mla_fp8kv.jit` need FlashInfer.
"""
