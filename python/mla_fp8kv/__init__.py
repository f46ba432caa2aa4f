"""FP8 KV caches for MLA in FlashInfer: kernels, their JIT module, and the wrapper backend.

Importing the package imports nothing else; `backend` and `jit` need FlashInfer.
"""
