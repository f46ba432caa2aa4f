"""`python -m mla_fp8kv verify` with a CPU computation in the kernel's place."""

import pytest

torch = pytest.importorskip("torch")

from mla_fp8kv import verify  # noqa: E402

SMALL = (verify.Shape(8, 2, 37), verify.Shape(4, 1, 50, queries=3, causal=True))


class Wrapper:
    """The float32 answer times `factor`; the output is bfloat16 as the kernels'."""

    def __init__(self, shape, slots, factor):
        self.shape, self.slots, self.factor = shape, slots, factor

    def run(self, q_nope, q_pe, ckv, kpe):
        q, cache = torch.cat([q_nope, q_pe], dim=-1), torch.cat([ckv.float(), kpe.float()], dim=-1)
        pool = cache.to(torch.float8_e4m3fn)
        return (verify._reference(self.shape, q, pool, self.slots) * self.factor).bfloat16()


@pytest.fixture
def small(monkeypatch):
    def use(factor):
        monkeypatch.setattr(verify, "PARITY", SMALL)
        monkeypatch.setattr(
            verify,
            "_plan",
            lambda _, shape, slots, kv_dtype: Wrapper(
                shape, slots, factor if kv_dtype.itemsize == 1 else 1.0
            ),
        )

    return use


@pytest.mark.parametrize("factor, passes", [(1.0, True), (0.0, False), (1.01, False)])
def test_parity(small, factor, passes):
    small(factor)
    report = []
    assert list(verify._parity(torch.empty(0), report)) == [passes] * len(SMALL)
    assert all(line.startswith("pass" if passes else "FAIL") for line in report)


def test_parity_refuses_nan(small):
    small(float("nan"))
    assert not any(verify._parity(torch.empty(0), []))


@pytest.mark.parametrize("ours, passes", [(6.0, True), (900.0, False)])
def test_speed(small, monkeypatch, ours, passes):
    small(1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 << 20, 10 << 20))
    times = iter([ours, 842.0])
    monkeypatch.setattr(verify, "_microseconds", lambda step: (step(), next(times))[1])
    report = []
    assert verify._speed(torch.empty(0), report) is passes
    assert "842.0 us" in report[0] and "pool of 4,854 tokens" in report[0]


def test_causal_reference():
    """The last query sees every token, each earlier one a token less."""
    shape = verify.Shape(2, 1, 5, queries=2, causal=True)
    pool, q, _ = verify._inputs(shape, 8, "cpu")
    slots = torch.arange(5)
    last = verify._reference(verify.Shape(2, 1, 5), q[1:], pool, slots)
    first = verify._reference(verify.Shape(2, 1, 4), q[:1], pool, slots[:4])
    assert torch.allclose(verify._reference(shape, q, pool, slots), torch.cat([first, last]))
