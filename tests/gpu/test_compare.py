"""The comparison itself: right results pass, and wrong ones of every kind fail. Needs no GPU."""

from dataclasses import replace

import mla_cases
import pytest
import torch
from mla_cases import Case, compare

CASE = Case(q_lens=(3, 1, 1), kv_lens=(64, 900, 0), heads=4, lse="base2")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(mla_cases, "DEVICE", "cpu")


def rounded(want, want_lse, dtype=torch.bfloat16):
    return want.to(dtype), (want_lse / torch.log(torch.tensor(2.0))).float()


@pytest.mark.parametrize("q", ["bf16", "fp16"])
def test_a_rounded_reference_passes(q):
    case = replace(CASE, q=q)
    want, want_lse = mla_cases.reference(mla_cases.make_inputs(case))
    got, lse = rounded(want, want_lse, mla_cases.Q16[q])
    assert compare(case, got, lse, want, want_lse) == []


def _one_row_zero(out):
    out[2, 3] = 0
    return out


def _one_element(out):
    out[1, 1, 77] += 0.1 * out[1, 1].abs().max()
    return out


def _not_empty(out):
    out[4, 0, 0] = 1e-3
    return out


def _nan(out):
    out[0, 0, 0] = float("nan")
    return out


WRONG = {
    "zeroed": torch.zeros_like,
    "heads permuted": lambda out: out.roll(1, 1),
    "dims permuted": lambda out: out.roll(1, 2),
    "neighbouring dims swapped": lambda out: out.unflatten(-1, (256, 2)).flip(-1).flatten(-2),
    "query tokens permuted": lambda out: out[[1, 0, 2, 3, 4]],
    "1 percent too large": lambda out: out * 1.01,
    "1 percent too small": lambda out: out * 0.99,
    "one row zero": _one_row_zero,
    "one element off": _one_element,
    "an empty row not zero": _not_empty,
    "one NaN": _nan,
    "noise of FP8 P": lambda out: out * (1 + 0.03 * torch.randn(out.shape)),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("q", ["bf16", "fp16"])
@pytest.mark.parametrize("group_scales", [False, True])
def test_wrong_results_fail(name, q, group_scales):
    torch.manual_seed(0)
    case = replace(CASE, q=q, group_scales=group_scales)
    want, want_lse = mla_cases.reference(mla_cases.make_inputs(case))
    got, lse = rounded(want, want_lse, mla_cases.Q16[q])
    assert compare(case, WRONG[name](got.clone()).to(got.dtype), lse, want, want_lse)


@pytest.mark.parametrize(("roundings", "passes"), [(10, True), (20, False)])
def test_noise_of_a_large_group_of_dims_is_its_own(roundings, passes):
    """Beside which that of the other groups, and so the row's, is small."""
    case = replace(CASE, q="fp16", group_scales=True, lse=None)
    want, want_lse = mla_cases.reference(mla_cases.make_inputs(case))
    want[..., 128:256] *= 8
    got = want.to(torch.float16)
    got[1, 1, 200] += roundings * 2**-11 * want[1, 1, 128:256].square().mean().sqrt()
    assert (compare(case, got, None, want, want_lse) == []) == passes


@pytest.mark.parametrize("what", ["values moved by one token", "last token dropped"])
def test_wrong_tokens_fail(what):
    case = replace(CASE, q_lens=(1,), kv_lens=(200,), heads=8, pages="ordered")
    inputs = mla_cases.make_inputs(case)
    want, want_lse = mla_cases.reference(inputs)
    if what == "last token dropped":
        wrong = replace(case, kv_lens=(199,))
        other = replace_case(inputs, wrong)
    else:
        other = replace_case(inputs, case)
        other.kpe = inputs.kpe.view(torch.uint8).roll(1, 0).view(inputs.kpe.dtype)
    got, lse = rounded(*mla_cases.reference(other))
    assert compare(case, got, None, want, want_lse)
    assert compare(case, want.to(torch.bfloat16), lse, want, want_lse)


def replace_case(inputs, case):
    values = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    return mla_cases.Inputs(**{**values, "case": case})


@pytest.mark.parametrize("error", [2e-3, -2e-3, float("inf"), float("nan")])
def test_wrong_lse_fails(error):
    want, want_lse = mla_cases.reference(mla_cases.make_inputs(CASE))
    got, lse = rounded(want, want_lse)
    lse[1, 2] += error
    assert compare(CASE, got, lse, want, want_lse)


def test_lse_base_matters():
    want, want_lse = mla_cases.reference(mla_cases.make_inputs(CASE))
    got, lse = rounded(want, want_lse)
    assert compare(replace(CASE, lse="basee"), got, lse, want, want_lse)


def test_the_reference_agrees_with_torch_attention():
    case = Case(q_lens=(5,), kv_lens=(37,), heads=3, causal=True, page_size=4, kpe_scale=0.5)
    inputs = mla_cases.make_inputs(case)
    want, _ = mla_cases.reference(inputs)
    ckv = mla_cases.gather(inputs.ckv, inputs.kv_indices, 37)
    kpe = mla_cases.gather(inputs.kpe, inputs.kv_indices, 37) * 0.5
    query = torch.cat([inputs.q_nope, inputs.q_pe], -1).double().transpose(0, 1)
    mask = torch.ones(5, 37, dtype=torch.bool).tril(32)
    got = torch.nn.functional.scaled_dot_product_attention(
        query, torch.cat([ckv, kpe], -1), ckv, attn_mask=mask, scale=case.sm_scale
    )
    assert torch.allclose(got.transpose(0, 1), want, rtol=1e-12, atol=1e-12)


def test_a_case_prints_a_line_that_repeats_it():
    case = Case(q_lens=(2, 1), kv_lens=(3, 0), heads=5, causal=True, kv="e5m2")
    code = case.line().split('"')[1].replace("check(", "(")
    scope = {}
    exec(f"from mla_cases import *; case = {code.split('; ')[1]}", scope)
    assert scope["case"] == case
