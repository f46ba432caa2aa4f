"""What a shape must move and compute at least, and what a measured time means against that."""

from __future__ import annotations

from dataclasses import dataclass

from .rows import HEAD_DIM_CKV, HEAD_DIM_KPE, SCALE_BYTES, TOKEN_BYTES, Row


def kv_bytes(row: Row) -> int:
    """Bytes of FP8 KV (and of group scales) one layer reads, each token once."""
    return row.kv_tokens * (TOKEN_BYTES + (SCALE_BYTES if row.group_scales else 0))


def flops(row: Row) -> int:
    """Multiplies and adds of Q K^T and P V over the (query, token) pairs that are visible."""
    if row.causal:
        # Query i of q sees kv - q + i + 1 tokens, never fewer than none.
        pairs = sum(
            max(kv - row.qo_len + i + 1, 0) for kv in row.kv_lens for i in range(row.qo_len)
        )
    else:
        pairs = row.kv_tokens * row.qo_len
    return 2 * (HEAD_DIM_CKV + HEAD_DIM_KPE + HEAD_DIM_CKV) * row.heads * pairs


def floor_us(row: Row, copy_gbps: float) -> float:
    """Time of reading the KV once at the bandwidth a device-to-device copy reached, in us."""
    return kv_bytes(row) / (copy_gbps * 1e3)


def derived(row: Row, us: float, copy_gbps: float, num_sms: int) -> dict[str, float]:
    """GB/s of KV (in all and an SM), % of the floor and TFLOPS of one layer that took `us`."""
    gbps = kv_bytes(row) / (us * 1e3)
    return {
        "floor_us": floor_us(row, copy_gbps),
        "gbps": gbps,
        "gbps_per_sm": gbps / num_sms,
        "percent_of_floor": 100 * floor_us(row, copy_gbps) / us,
        "tflops": flops(row) / (us * 1e6),
    }


@dataclass(frozen=True)
class Part:
    """A GPU with 101,376 B of shared memory a block; figures of its datasheet, not measured."""

    name: str
    sm: int
    sms: int
    memory_gbps: float

    @property
    def gbps_per_sm(self) -> float:
        return self.memory_gbps / self.sms


# What one SM of a real 100 KB part can be fed: compared with what one CTA an SM reaches here.
PARTS_100K = (
    Part("RTX PRO 6000 Blackwell", 120, 188, 1792),
    Part("RTX 5090", 120, 170, 1792),
    Part("DGX Spark (GB10)", 121, 48, 273),
    Part("RTX 4090", 89, 128, 1008),
    Part("RTX 6000 Ada", 89, 142, 960),
    Part("L40S", 89, 142, 864),
    Part("L4", 89, 58, 300),
    Part("RTX 3090", 86, 82, 936),
    Part("RTX A6000", 86, 84, 768),
    Part("A10", 86, 72, 600),
)
