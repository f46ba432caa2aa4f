"""How things are timed: CUDA graphs over all layers, events around each replay, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .rows import LAYERS

COPY_BYTES = 4 * 10**9
_BUDGET_US = 30_000  # of replays for one number: cast paths get fewer, quick kernels more
_REPLAYS = (5, 41)
_FLUSH_BYTES = 256 << 20  # more than any L2


@dataclass(frozen=True)
class Timing:
    """One layer's time in us: the median over replays, and how far the quartiles lie apart."""

    us: float
    spread_us: float


class LayerGraph:
    """A CUDA graph that runs all layers once, each on its own pool."""

    def __init__(self, run_layer: Callable[[int], object]):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for layer in range(LAYERS):  # compiles, tunes and allocates whatever is lazy
                run_layer(layer)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            for layer in range(LAYERS):
                run_layer(layer)
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        (first,) = self._replay(1)
        self._replays = int(min(max(_BUDGET_US / first, _REPLAYS[0]), _REPLAYS[1]))

    def time(self, flush_l2: bool = False) -> Timing:
        """Time of a layer over back-to-back replays, or with L2 overwritten before each replay."""
        layer_us = [us / LAYERS for us in self._replay(self._replays, flush_l2)]
        low, _, high = statistics.quantiles(layer_us, n=4)
        return Timing(statistics.median(layer_us), high - low)

    def _replay(self, replays: int, flush_l2: bool = False) -> list[float]:
        """Times of `replays` replays, in us.

        Everything is enqueued at once behind one long memset, so that no time of the host's
        launches falls between the events.
        """
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(replays)
        ]
        self._flush.zero_()
        self._graph.replay()
        for start, end in events:
            if flush_l2:
                self._flush.zero_()
            start.record()
            self._graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events]


def _median_us(call: Callable[[], object], repeat: int) -> float:
    times = []
    call()
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def copy_gbps() -> float:
    """Bandwidth of a 4 GB device-to-device copy in GB/s, bytes read plus bytes written."""
    free, _ = torch.cuda.mem_get_info()
    size = min(COPY_BYTES, free // 3)
    source = torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return 2 * size / (1e3 * _median_us(lambda: target.copy_(source), 15))


def gemm_tflops() -> float:
    """Rate of a large BF16 matrix product on random data, in TFLOPS: the roof of the plot."""
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * n**3 / (1e6 * _median_us(lambda: a @ b, 15))


def host_us(call: Callable[[], object], repeat: int, settle: Callable[[], object]) -> float:
    """Median wall time of `call` on the host in us; `settle` runs after each, untimed."""
    times = []
    for _ in range(repeat + 5):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        settle()
    return statistics.median(times[5:])
