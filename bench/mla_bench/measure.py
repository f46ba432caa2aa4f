"""One run: measures rows, variants and baselines and collects them in the form of a result file."""

from __future__ import annotations

import re
import shlex
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch

from . import host_cost, machine, results, timing
from .case import Case, Pools
from .contenders import Baseline, Prepared, ours
from .roofline import derived, kv_bytes
from .rows import Row, Variant

# The worst contender (FP8 query or P) has 3.5e-2; a time with a larger error is of something else.
_LARGEST_ERROR = 0.1


class WrongResult(Exception):
    """A contender whose output is not the attention of the case."""


@dataclass
class Measured:
    """Timing of a contender whose answer was checked (`rel_err`; None: not meant to be right)."""

    graph: timing.LayerGraph
    timing: timing.Timing
    rel_err: float | None


def measure(case: Case, prepared: Prepared, check: bool = True) -> Measured:
    """Checks layer 0 of a contender against float64, and times it."""
    case.out.fill_(float("nan"))  # what is not written must not pass
    out = prepared.run_layer(0)
    rel_err = case.relative_error(out, prepared.page_size) if check else None
    if rel_err is not None and not rel_err < _LARGEST_ERROR:
        raise WrongResult(f"relative error {rel_err:.3g}")
    graph = timing.LayerGraph(prepared.run_layer)
    return Measured(graph, graph.time(), rel_err)


def reason(error: Exception) -> str:
    """The first line of an error for the reader of the results, without this machine's folders."""
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {re.sub(r'(?:/[^/ ]+)+/', '', first)}".removesuffix(": ")


class Run:
    """One run, with its row results as they come in.

    Attributes:
        result: the result file's content so far; see `results`.
    """

    def __init__(self, arguments: list[str], device: str = "cuda"):
        self.device = device
        self.result = {
            "schema": results.SCHEMA,
            "run_id": uuid.uuid4().hex,
            "complete": False,
            "command": shlex.join(["python", "bench/run.py", *arguments]),
            "machine": machine.facts(),
            "copy_gbps": timing.copy_gbps(),
            "copy_gbps_end": None,
            "gemm_tflops": timing.gemm_tflops(),
            "rows": [],
            "unavailable": {},
            "host": None,
        }

    def measure(
        self,
        rows: tuple[Row, ...],
        variants: tuple[Variant, ...],
        baselines: tuple[Baseline, ...],
        host: bool,
        path: Path,
    ) -> None:
        """Measures everything, saving after each row: a run that is cut short keeps what it has."""
        pools = None
        for row in sorted(rows, key=lambda row: row.kv_dtype):
            if pools is None or pools.kv_dtype != row.kv_dtype:
                pools = None  # the other format's pools go first
                pools = Pools(row.kv_dtype, self.device)
                if host and self.result["host"] is None:
                    self._measure_host(pools)
            begin = time.monotonic()
            records = self._measure_row(Case(row, pools), variants, baselines)
            self.result["rows"] += records
            results.save(self.result, path)
            us = results.number(records[0]["us"] if records else None)
            print(f"{row.name:26} {us:>8} us  {time.monotonic() - begin:5.1f} s", flush=True)
        self.result["copy_gbps_end"] = timing.copy_gbps()
        self.result["complete"] = True
        results.save(self.result, path)

    def _measure_host(self, pools: Pools) -> None:
        try:
            self.result["host"] = host_cost.measure(pools)
        except Exception as error:
            self._give_up_if_broken(error)
            self.result["unavailable"]["host"] = reason(error)

    def _measure_row(self, case: Case, variants, baselines) -> list[dict]:
        """Records of the variants that run; the others are named with the reason."""
        row = case.row
        baseline_us, baseline_rel_err, unavailable = {}, {}, {}
        for baseline in baselines:
            try:
                measured = measure(case, baseline.prepare(case))
            except Exception as error:
                self._give_up_if_broken(error)
                unavailable[baseline.name] = reason(error)
            else:
                baseline_us[baseline.name] = measured.timing.us
                baseline_rel_err[baseline.name] = measured.rel_err

        records = []
        for variant in variants:
            if variant.core_only and row.group != "core":
                continue
            try:
                prepared = ours(case, variant)
                measured = measure(case, prepared)
            except Exception as error:
                self._give_up_if_broken(error)
                self.result["unavailable"][f"{row.name} {variant.name}"] = reason(error)
                continue
            wrapper = prepared.wrapper
            missing = dict(unavailable)
            loads_only_us = None
            try:
                loads = measure(case, ours(case, variant, loads_only=True), check=False)
                loads_only_us = loads.timing.us
            except Exception as error:
                self._give_up_if_broken(error)
                missing["loads only"] = reason(error)
            us = measured.timing.us
            records.append(
                {
                    **_shape(row),
                    "variant": variant.name,
                    "backend": wrapper._backend,
                    "us": us,
                    "spread_us": measured.timing.spread_us,
                    "us_l2_flushed": self._flushed_us(case, measured),
                    "loads_only_us": loads_only_us,
                    **derived(row, us, self.result["copy_gbps"], self.result["machine"]["sms"]),
                    "plan": [int(number) for number in wrapper._plan_info],
                    "rel_err": measured.rel_err,
                    "baselines": baseline_us,
                    "baseline_rel_err": baseline_rel_err,
                    "ratios": {name: theirs / us for name, theirs in baseline_us.items()},
                    "unavailable": missing,
                }
            )
        return records

    def _flushed_us(self, case: Case, measured: Measured) -> float | None:
        """Time with a flushed L2, where the KV of all layers fits in it from replay to replay."""
        all_layers = len(case.pools.fp8) * kv_bytes(case.row)
        if all_layers > self.result["machine"]["l2_bytes"]:
            return None
        return measured.graph.time(flush_l2=True).us

    @staticmethod
    def _give_up_if_broken(error: Exception) -> None:
        """A CUDA error that outlives its contender would fail all others: end the run with it."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise error from None


def _shape(row: Row) -> dict:
    return {
        "name": row.name,
        "group": row.group,
        "heads": row.heads,
        "batch": row.batch,
        "kv_len": row.kv_len,
        "kv_tokens": row.kv_tokens,
        "qo_len": row.qo_len,
        "causal": row.causal,
        "page_size": row.page_size,
        "kv_dtype": row.kv_dtype,
        "group_scales": row.group_scales,
        "target_us": row.target_us,
    }
