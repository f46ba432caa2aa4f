"""The results that the GPU test compares with are those of the kernels as they are now."""

from __future__ import annotations

import agreement_data
import numpy as np
import pytest
from agreement import CASES, DATA, AgreementCase, disagreement


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stored_results_are_current(case: AgreementCase) -> None:
    with np.load(DATA) as data:
        out, lse = agreement_data.run_on_host(case, data)
        stored_out, stored_lse = data[f"{case.name}/out"], data[f"{case.name}/lse"]
    assert disagreement(case, out, lse, stored_out, stored_lse) == "", (
        "if the kernel changed on purpose, run python tests/host/agreement_data.py"
    )


def test_the_comparison_rejects_what_is_wrong() -> None:
    case = CASES[0]
    with np.load(DATA) as data:
        out, lse = data[f"{case.name}/out"], data[f"{case.name}/lse"]
    assert disagreement(case, out, lse, out, lse) == ""
    two_off = out.copy()
    two_off[0, 0, np.argmax(out[0, 0] & 0x7FFF)] += 2
    assert "further apart than one rounding" in disagreement(case, two_off, lse, out, lse)
    assert "elements differ" in disagreement(case, out + np.uint16(1), lse, out, lse)
    assert "LSEs differ" in disagreement(case, out, lse * np.float32(1.0001), out, lse)


def test_the_file_is_small() -> None:
    assert DATA.stat().st_size < 300_000
