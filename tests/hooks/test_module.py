"""The module as wrappers and SGLang call it: plan() brings exactly its own bytes to the GPU."""

import contextlib

import pytest
import torch


class Compiled:
    """plan() of a compiled module: fills the pinned workspace and says how much of it counts."""

    run, forget = object(), object()

    def __init__(self, size):
        self.size = size

    def plan(self, float_workspace, int_workspace, pinned_workspace, *arguments):
        pinned_workspace.fill_(9)
        self.arguments = arguments
        return ["plan", "info"], self.size


@pytest.mark.parametrize("size", [0, 16, 64])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_plan_stages_its_bytes(flashinfer, unpinned, monkeypatch, size, dtype):
    from mla_fp8kv.module import StagedModule

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    compiled = Compiled(size)
    module = StagedModule(compiled)
    on_gpu = torch.zeros(64, dtype=torch.uint8).view(dtype)
    pinned = torch.zeros(64, dtype=torch.uint8)
    assert module.plan(None, on_gpu, pinned, 1, 2, 3) == ["plan", "info"]
    assert compiled.arguments == (1, 2, 3)
    assert on_gpu.view(torch.uint8).tolist() == [9] * size + [0] * (64 - size)
    assert (module.run, module.forget) == (Compiled.run, Compiled.forget)
