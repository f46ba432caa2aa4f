"""The compiled module as FlashInfer's wrappers and SGLang call it."""

import torch


class StagedModule:
    """A loaded module whose plan() also brings the work list to the GPU.

    The module writes the list into the wrapper's pinned workspace, which the next plan overwrites.
    So it travels through pinned memory of its own, which PyTorch keeps until the copy is done.
    """

    def __init__(self, module) -> None:
        self.run = module.run
        self.forget = module.forget
        self._plan = module.plan

    def plan(self, float_workspace, int_workspace, pinned_workspace, *arguments):
        """plan_info for run(); the signature that SGLang calls before it replays a CUDA graph.

        Further arguments: qo_indptr, kv_indptr and kv_len_arr (int32, on the CPU), num_heads,
        head_dim_ckv, causal.
        """
        plan_info, size = self._plan(float_workspace, int_workspace, pinned_workspace, *arguments)
        staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        staging.copy_(pinned_workspace.view(torch.uint8)[:size])
        with torch.cuda.device(int_workspace.device):
            int_workspace.view(torch.uint8)[:size].copy_(staging, non_blocking=True)
        return plan_info
