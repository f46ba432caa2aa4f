"""The GPU gives what the execution of the same kernels on the host gave."""

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

import variants  # noqa: E402
from agreement import CASES, DATA, arrays_of, disagreement  # noqa: E402
from mla_cases import FP8, Q16, new_wrapper  # noqa: E402

pytestmark = pytest.mark.gpu


def to_gpu(array, dtype=None):
    """16-bit words travel as int16, which every torch can take from numpy."""
    if array.dtype == np.uint16:
        array = array.view(np.int16)
    tensor = torch.from_numpy(array).cuda()
    return tensor if dtype is None else tensor.view(dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gpu_agrees_with_host(case, monkeypatch):
    variants.use(variants.Tile(case.rows, "wgmma" if case.wgmma else ""), monkeypatch)
    if case.bits:
        monkeypatch.setenv("MLA_FP8KV_DEQUANT", "bits")
    with np.load(DATA) as data:
        arrays = arrays_of(case, data)
        host_out, host_lse = data[f"{case.name}/out"], data[f"{case.name}/lse"]
    # Not "auto", which may leave a shape to another kernel.
    wrapper = new_wrapper("fa2")
    wrapper.plan(
        to_gpu(arrays.qo_indptr),
        to_gpu(arrays.kv_indptr),
        to_gpu(arrays.kv_indices),
        to_gpu(arrays.kv_len),
        case.heads,
        512,
        case.kpe,
        case.page_size,
        case.causal,
        case.sm_scale,
        Q16[case.q],
        FP8[case.kv],
    )
    scales = None if arrays.group_scales is None else to_gpu(arrays.group_scales)
    out, lse = wrapper.run(
        to_gpu(arrays.q_nope, Q16[case.q]),
        to_gpu(arrays.q_pe, Q16[case.q]),
        to_gpu(arrays.ckv, FP8[case.kv]),
        to_gpu(arrays.kpe, FP8[case.kv]),
        return_lse=True,
        return_lse_base_on_e=case.lse_base_e,
        ckv_scale=None if scales is not None else case.ckv_scale,
        kpe_scale=case.kpe_scale,
        ckv_scale_arr=scales,
    )
    gpu_out = out.view(torch.int16).cpu().numpy().view(np.uint16)
    assert disagreement(case, gpu_out, lse.cpu().numpy(), host_out, host_lse) == ""
