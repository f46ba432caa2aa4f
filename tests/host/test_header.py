"""The host form of kernel/ptx.cuh against what NVIDIA documents, and the faults it must see."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
from host_library import HERE, KERNEL, load_library
from kernel_call import fp8_values, from_16_bits

LANES = np.arange(32)
GROUP, IN_GROUP = LANES // 4, LANES % 4


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    lib = load_library("header_cases.cpp", {"MLA_FP8KV_HAS_CVT_E4M3": 1})
    lib.divide.restype = lib.maximum.restype = ctypes.c_float
    lib.divide.argtypes = lib.maximum.argtypes = [ctypes.c_float] * 2
    lib.byte_permute.restype = lib.mul_high.restype = ctypes.c_uint32
    lib.byte_permute.argtypes = [ctypes.c_uint32] * 3
    lib.mul_high.argtypes = [ctypes.c_uint32] * 2
    return lib


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def halves(words: np.ndarray) -> np.ndarray:
    """uint32 [...] to the FP16 pairs in it, low half first, as float64 [..., 2]."""
    return words.view(np.uint16).reshape(*words.shape, 2).view(np.float16).astype(np.float64)


def faults_of(library: ctypes.CDLL, name: str) -> str:
    text = ctypes.create_string_buffer(4096)
    library.faults_of(name.encode(), text, len(text))
    return text.value.decode()


def test_every_wrapper_has_a_host_form() -> None:
    names = re.compile(
        r"^(?:template .*\n)?(?:MLA_DEVICE|inline|__attribute__\S+ inline) .*?(\w+)\(", re.M
    )
    device = set(names.findall((KERNEL / "ptx.cuh").read_text()))
    host = set(re.findall(r"(\w+)\(", (HERE / "host_ptx.h").read_text()))
    assert len(device) > 30
    assert device <= host, device - host


# ---- fragment layouts, as PTX ISA tabulates them ("Matrix Fragments for mma.m16n8k16", "ldmatrix")


def test_mma_fragments(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal((16, 16)).astype(np.float16)
    b = rng.standard_normal((16, 8)).astype(np.float16)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    a_fragment = np.empty((32, 8), np.float16)
    for i in range(8):
        row = GROUP + (0 if i < 2 or 4 <= i < 6 else 8)
        a_fragment[:, i] = a[row, IN_GROUP * 2 + (i & 1) + (8 if i >= 4 else 0)]
    b_fragment = np.empty((32, 4), np.float16)
    for i in range(4):
        b_fragment[:, i] = b[IN_GROUP * 2 + (i & 1) + (8 if i >= 2 else 0), GROUP]
    c_fragment = np.empty((32, 4), np.float32)
    c_places = [(GROUP + (0 if i < 2 else 8), IN_GROUP * 2 + (i & 1)) for i in range(4)]
    for i, place in enumerate(c_places):
        c_fragment[:, i] = c[place]
    library.mma(pointer(c_fragment), pointer(a_fragment), pointer(b_fragment))
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    for i, place in enumerate(c_places):
        np.testing.assert_allclose(c_fragment[:, i], want[place], rtol=2**-23, atol=2**-30)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**-24, 65504.0])
def test_mma_special_values(library: ctypes.CDLL, value: float) -> None:
    """Subnormal inputs count, infinities and NaN spread to their row only."""
    a = np.zeros((32, 8), np.float16)
    a[0, 0] = value  # row 0, k 0
    b = np.zeros((32, 4), np.float16)
    b[IN_GROUP == 0, 0] = 1  # k 0, every column
    c = np.zeros((32, 4), np.float32)
    library.mma(pointer(c), pointer(a), pointer(b))
    np.testing.assert_array_equal(c[:4, :2], np.float32(value))
    assert (c[:, 2:] == 0).all() and (c[4:] == 0).all()


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_ldmatrix_layout(library: ctypes.CDLL, kind: int) -> None:
    """Thread T holds elements 2(T%4), 2(T%4)+1 of row T/4; transposed: of column T/4."""
    rng = np.random.default_rng(kind)
    shared = rng.integers(0, 1 << 16, (64, 8)).astype(np.uint16)  # 64 rows of 16 bytes
    at = rng.permutation(64)[:32]
    rows = (16 * at).astype(np.uint32)
    got = np.zeros((32, 4), np.uint32)
    text = ctypes.create_string_buffer(4096)
    library.ldmatrix(
        kind, pointer(shared), shared.nbytes, pointer(rows), pointer(got), text, len(text)
    )
    for j in range(2 if kind == 2 else 4):
        matrix = shared[at[8 * j : 8 * j + 8]]
        if kind > 0:
            matrix = matrix.T
        pairs = np.stack([matrix[GROUP, 2 * IN_GROUP], matrix[GROUP, 2 * IN_GROUP + 1]], axis=1)
        np.testing.assert_array_equal(got[:, j], pairs.copy().view(np.uint32)[:, 0])


@pytest.mark.parametrize(
    ("stride", "extra_passes"), [(16, 0), (592, 0), (128, 28), (64, 12), (1024, 28), (576, 12)]
)
def test_bank_conflicts_of_ldmatrix(library: ctypes.CDLL, stride: int, extra_passes: int) -> None:
    """A matrix takes one pass if its 8 rows of 16 bytes lie in 8 different 16-byte bank groups."""
    shared = np.zeros(32 * stride + 16, np.uint8)
    rows = (np.arange(32) * stride).astype(np.uint32)
    got = np.zeros((32, 4), np.uint32)
    text = ctypes.create_string_buffer(4096)
    library.ldmatrix(0, pointer(shared), 32 * stride, pointer(rows), pointer(got), text, len(text))
    assert f"ldmatrix 4 {extra_passes}\n" in text.value.decode()


# ---- conversions


def all_f16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def test_f16_rounds_to_nearest_even(library: ctypes.CDLL) -> None:
    """Every FP16 value, and just below, at and above the middle between each and the next."""
    exact = all_f16().astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    middle = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
    middle = np.concatenate([middle, [np.float32(65520), np.float32(-65520)]])
    values = np.concatenate(
        [
            exact,
            middle,
            np.nextafter(middle, np.float32(np.inf)),
            np.nextafter(middle, np.float32(-np.inf)),
        ]
        + [np.array([np.inf, -np.inf, 1e30, -1e30, 1e-30, -1e-30], np.float32)]
    )
    values = np.ascontiguousarray(np.resize(values, len(values) + len(values) % 2))
    pairs = np.zeros(len(values) // 2, np.uint32)
    library.pack_f16(pointer(values), pointer(pairs), len(pairs))
    with np.errstate(over="ignore"):
        want = values.astype(np.float16)
    np.testing.assert_array_equal(pairs.view(np.uint16), want.view(np.uint16))


def test_f16_of_nan_and_order_of_the_pair(library: ctypes.CDLL) -> None:
    values = np.array([np.nan, 1.0], np.float32)
    pairs = np.zeros(1, np.uint32)
    library.pack_f16(pointer(values), pointer(pairs), 1)
    assert pairs[0] == 0x3C007FFF  # the first argument is the low half
    library.pack_bf16(pointer(values), pointer(pairs), 1)
    assert pairs[0] == 0x3F807FFF


def test_f16_unpacks_exactly(library: ctypes.CDLL) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    values = np.zeros(1 << 16, np.float32)
    library.unpack_f16(pointer(words), pointer(values), 1 << 15)
    np.testing.assert_array_equal(values, all_f16().astype(np.float32))


def test_bf16_rounds_to_nearest_even(library: ctypes.CDLL) -> None:
    top = np.arange(1 << 16, dtype=np.uint32)
    top = top[((top >> 7) & 0xFF) != 0xFF]
    for low, up in ((0, 0), (0x7FFF, 0), (0x8000, top & 1), (0x8001, 1)):
        values = (top << 16 | low).view(np.float32)
        pairs = np.zeros(len(values) // 2, np.uint32)
        library.pack_bf16(pointer(values), pointer(pairs), len(pairs))
        np.testing.assert_array_equal(pairs.view(np.uint16), top + up)


def test_e4m3_converts_exactly(library: ctypes.CDLL) -> None:
    codes = np.arange(256, dtype=np.uint8)
    pairs = np.zeros((64, 2), np.uint32)
    library.convert_e4m3(pointer(codes), pointer(pairs), 64)
    np.testing.assert_array_equal(halves(pairs).reshape(256), fp8_values(e5m2=False))
    assert (pairs.view(np.uint16).reshape(256)[[0x7F, 0xFF]] == 0x7FFF).all()


def test_fp8_reference_values() -> None:
    """The table the other tests trust, at the corners the OCP FP8 specification names."""
    e4m3, e5m2 = fp8_values(e5m2=False), fp8_values(e5m2=True)
    assert e4m3[0x7E] == 448 and e4m3[0x08] == 2.0**-6 and e4m3[0x01] == 2.0**-9 and e4m3[0x38] == 1
    assert np.isnan(e4m3[[0x7F, 0xFF]]).all() and np.isnan(e4m3).sum() == 2
    assert (
        e5m2[0x7B] == 57344
        and e5m2[0x04] == 2.0**-14
        and e5m2[0x01] == 2.0**-16
        and e5m2[0x3C] == 1
    )
    assert e5m2[0x7C] == np.inf and e5m2[0xFC] == -np.inf and np.isnan(e5m2).sum() == 6
    np.testing.assert_array_equal(
        (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float64), e5m2
    )
    np.testing.assert_array_equal(
        from_16_bits(np.array([0x3F80, 0xC000], np.uint16), True), [1, -2]
    )


# ---- arithmetic


def approximate(library: ctypes.CDLL, what: int, x: list[float] | np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float32)
    y = np.zeros_like(x)
    library.approximate(what, pointer(x), pointer(y), len(x))
    return y


def test_exp2(library: ctypes.CDLL) -> None:
    x = np.linspace(-125, 127, 10001).astype(np.float32)
    np.testing.assert_allclose(
        approximate(library, 0, x), np.exp2(x.astype(np.float64)), rtol=2**-22
    )
    # Subnormal results are flushed, and so are subnormal arguments.
    np.testing.assert_array_equal(
        approximate(library, 0, [-np.inf, np.inf, 128, -127, -200, 1e-40, np.nan]),
        np.array([0, np.inf, np.inf, 0, 0, 1, np.nan], np.float32),
    )


def test_log2(library: ctypes.CDLL) -> None:
    x = np.exp2(np.linspace(-125, 127, 10001)).astype(np.float32)
    np.testing.assert_allclose(
        approximate(library, 1, x), np.log2(x.astype(np.float64)), rtol=2**-22, atol=2**-22
    )
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            approximate(library, 1, [0, 1e-40, np.inf, -1]),
            np.array([-np.inf, -np.inf, np.inf, np.nan]),
        )


def test_divide_maximum_permute(library: ctypes.CDLL) -> None:
    assert library.divide(1, 3) == pytest.approx(1 / 3, rel=2**-22)
    assert library.divide(1, 2.0**127) == 0  # as __fdividef documents for 2^126 < |b| < 2^128
    assert np.isnan(library.divide(np.inf, 2.0**127))
    assert library.maximum(np.nan, 2) == 2 and library.maximum(2, np.nan) == 2
    assert library.byte_permute(0x33221100, 0x77665544, 0x7041) == 0x77004411
    assert library.byte_permute(0x33221100, 0, 0x3120) == 0x33112200
    assert library.mul_high(0xFFFFFFFF, 0xFFFFFFFF) == 0xFFFFFFFE


# ---- order, memory, faults


@pytest.mark.parametrize(
    "name",
    [
        "exchange between warps, barrier",
        "exchange between warps, barrier, reversed",
        "exchange within a warp, warp barrier",
        "exchange within a warp, block barrier",
        "own bytes, no barrier",
        "votes",
        "some warps, in order",
        "some warps, in order, reversed",
        "some warps, votes",
        "shuffles",
        "copy, wait",
        "copy, waited for two groups of three",
        "copy, other lane's bytes, wait, warp barrier",
        "copy, other warp's bytes, wait, barrier",
        "copy of 4 bytes",
        "copy zeros",
        "global, right",
    ],
)
def test_right_programs_have_no_fault(library: ctypes.CDLL, name: str) -> None:
    assert faults_of(library, name) == ""


RACE = "race: {} and {} of two warps touch the same shared bytes with no barrier between"
LANES_RACE = RACE.replace("two warps", "two lanes of a warp")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("exchange between warps, no barrier", RACE.format("st.shared", "ld.shared")),
        ("exchange between warps, no barrier, reversed", RACE.format("st.shared", "ld.shared")),
        ("exchange between warps, warp barrier only", RACE.format("ld.shared", "st.shared")),
        ("exchange within a warp, no barrier", LANES_RACE.format("st.shared", "ld.shared")),
        ("write after read, no barrier", RACE.format("st.shared", "ld.shared")),
        ("copy over bytes another warp still reads", RACE.format("cp.async", "ld.shared")),
        ("copy, other warp's bytes, wait only", RACE.format("cp.async", "ld.shared")),
        ("copy, other lane's bytes, wait only", LANES_RACE.format("cp.async", "ld.shared")),
        ("copy, other warp's bytes, barrier before wait", RACE.format("ld.shared", "cp.async")),
        ("copy, no wait", "ld.shared reads shared memory whose cp.async was not waited for"),
        ("copy, no wait", "wrong value"),
        (
            "copy, no wait, barrier",
            "ld.shared reads shared memory whose cp.async was not waited for",
        ),
        ("copy, waited for an older group", "whose cp.async was not waited for"),
        ("unwritten", "ld.shared reads shared memory that nobody wrote"),
        ("out of bounds", "st.shared is out of shared memory: offset 64 of 64 bytes"),
        ("below the base", "st.shared is out of shared memory: offset -4 of 64 bytes"),
        ("misaligned", "st.shared is misaligned"),
        (
            "barrier missed by a warp",
            "wait for others that never come: 32 of 64 threads at sync_block",
        ),
        (
            "collective missed by a lane",
            "wait for others that never come: 31 lanes of warp 0 at shuffle_xor",
        ),
        ("different collectives", "any meets shuffle_xor of other lanes of the warp"),
        ("different barriers", "sync_block_or meets sync_block of other threads"),
        ("some warps, written after the arrival", RACE.format("ld.shared", "st.shared")),
        ("some warps, read without waiting", RACE.format("ld.shared", "st.shared")),
        (
            "some warps, one never comes",
            "wait for others that never come: 32 of 64 threads at a barrier",
        ),
        ("global, read out of bounds", "ld_const is outside of every global buffer"),
        ("global, written twice", "st_global writes out a second time"),
        ("global, write to input", "st_global writes read-only, which is read-only"),
        ("global, misaligned", "ld_const is misaligned in read-only"),
        (
            "global, fresh bytes before the wait",
            "ld_fresh reads partials before wait_for_previous_kernel",
        ),
        ("block that never waits for the previous kernel", "never called wait_for_previous_kernel"),
    ],
)
def test_faults_are_seen(library: ctypes.CDLL, name: str, fault: str) -> None:
    assert fault in faults_of(library, name)
