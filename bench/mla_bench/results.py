"""Result files: their form, what may be compared, and the tables made from them. No torch here."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from .roofline import PARTS_100K
from .rows import NATIVE

SCHEMA = 1

# Field of a row -> type; all are required, "| None" may be null.
_ROW_FIELDS = {
    "name": str,
    "group": str,
    "heads": int,
    "batch": int,
    "kv_len": int,
    "kv_tokens": int,
    "qo_len": int,
    "causal": bool,
    "page_size": int,
    "kv_dtype": str,
    "group_scales": bool,
    "variant": str,
    "backend": str,
    "us": float,
    "spread_us": float,
    "us_l2_flushed": float | None,
    "loads_only_us": float | None,
    "floor_us": float,
    "target_us": float | None,
    "gbps": float,
    "gbps_per_sm": float,
    "percent_of_floor": float,
    "tflops": float,
    "plan": list,  # what the module's plan() returned: for ours version, tile, grid, merges, heads
    "rel_err": float,
    "baselines": dict,
    "baseline_rel_err": dict,
    "ratios": dict,
    "unavailable": dict,
}
_TOP_FIELDS = {
    "schema": int,
    "run_id": str,
    "complete": bool,
    "command": str,
    "machine": dict,
    "copy_gbps": float,
    "copy_gbps_end": float | None,
    "gemm_tflops": float,
    "rows": list,
    "unavailable": dict,
    "host": dict | None,
}


class InvalidResult(ValueError):
    """A result file that this harness did not write, or that was edited."""


class DifferentRuns(ValueError):
    """An attempt to compare numbers that were not measured in one run."""


def _check_fields(where: str, record: dict, fields: dict) -> None:
    if missing := sorted(fields.keys() - record.keys()):
        raise InvalidResult(f"{where} lacks {', '.join(missing)}.")
    if unknown := sorted(record.keys() - fields.keys()):
        raise InvalidResult(f"{where} has unknown fields {', '.join(unknown)}.")
    for name, kind in fields.items():
        value = record[name]
        integral = isinstance(value, int) and not isinstance(value, bool)
        allowed = isinstance(value, kind) or (integral and isinstance(0.0, kind))
        if isinstance(value, bool) and kind is not bool or not allowed:
            raise InvalidResult(f"{where}: {name} must be {kind}, got {value!r}.")


def validate(result: dict) -> dict:
    """Returns `result`; raises InvalidResult where it is not of the form described here."""
    _check_fields("the result", result, _TOP_FIELDS)
    if result["schema"] != SCHEMA:
        raise InvalidResult(f"schema {SCHEMA} is supported, got {result['schema']}.")
    seen = set()
    for row in result["rows"]:
        where = f"row {row.get('name')} {row.get('variant')}"
        _check_fields(where, row, _ROW_FIELDS)
        for name, us in row["baselines"].items():
            if not us > 0:
                raise InvalidResult(f"{where}: baseline {name} must be positive, got {us!r}.")
        if not row["us"] > 0:
            raise InvalidResult(f"{where}: us must be positive, got {row['us']!r}.")
        key = row["name"], row["variant"]
        if key in seen:
            raise InvalidResult(f"{where} is there twice.")
        seen.add(key)
    return result


def save(result: dict, path: Path) -> None:
    """Writes a valid result; an interrupted write leaves the file as it was."""
    validate(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(unfinished, path)


def load(path: Path) -> dict:
    """A result file, checked."""
    return validate(json.loads(Path(path).read_text()))


def times(result: dict, what: str) -> dict[str, float]:
    """Row name -> us of a variant of ours or of a baseline."""
    of_variant = {r["name"]: r["us"] for r in result["rows"] if r["variant"] == what}
    of_baseline = {
        r["name"]: r["baselines"][what] for r in result["rows"] if what in r["baselines"]
    }
    found = of_variant or of_baseline
    if not found:
        known = {r["variant"] for r in result["rows"]}
        known.update(*(r["baselines"] for r in result["rows"]))
        raise ValueError(f"no {what!r} in this run: it has {', '.join(sorted(known))}.")
    return found


def compare(first: dict, what: str, second: dict, against: str) -> list[tuple]:
    """(row, us of `what`, us of `against`, their ratio) for the rows that both have.

    Raises DifferentRuns unless both results are the same run: another run is another machine,
    clock and temperature, and such differences are as large as those looked for.
    """
    if first["run_id"] != second["run_id"]:
        raise DifferentRuns(
            f"these numbers come from different runs ({first['run_id']} and {second['run_id']}), "
            "which differ by some percent for the same code: measure both in one run."
        )
    ours, theirs = times(first, what), times(second, against)
    return [
        (name, ours[name], theirs[name], theirs[name] / ours[name])
        for name in ours
        if name in theirs
    ]


def baseline_names(rows: list[dict]) -> list[str]:
    """The baselines that at least one row has, in the order in which they were measured."""
    return list(dict.fromkeys(name for row in rows for name in row["baselines"]))


def number(value: float | None, digits: int = 3) -> str:
    """`value` to `digits` significant digits, never in exponent form above 1e-2; "-" for None."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return str(value)
    if abs(value) < 1e-2:
        return f"{value:.1e}"
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{places}f}"


def _cells(result: dict, variant: str) -> tuple[list[str], list[list[str]]]:
    rows = [r for r in result["rows"] if r["variant"] == variant]
    peers = baseline_names(rows)
    head = ["row", "us", "target", "floor", "% floor", "loads", "GB/s", "TFLOPS", "rel err", *peers]
    body = []
    for r in rows:
        cells = [r["name"], number(r["us"]), number(r["target_us"]), number(r["floor_us"])]
        cells += [number(r["percent_of_floor"]), number(r["loads_only_us"]), number(r["gbps"])]
        cells += [number(r["tflops"]), number(r["rel_err"])]
        for peer in peers:
            us = r["baselines"].get(peer)
            cells.append(f"{number(us)} ({number(r['ratios'][peer])}x)" if us else "-")
        body.append(cells)
    return head, body


def text_table(result: dict, variant: str = NATIVE) -> str:
    """One line a row: ours in a variant, and each baseline's us with its ratio to ours."""
    head, body = _cells(result, variant)
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        for line in [head, *body]
    ]
    return "\n".join("  ".join(line) for line in lines)


def markdown_table(result: dict, variant: str = NATIVE) -> str:
    """The same as a Markdown table."""
    head, body = _cells(result, variant)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def variants_table(result: dict) -> str:
    """The variants side by side: us and the ratio to native; "=" marks an unchanged plan."""
    rows = list(dict.fromkeys(r["name"] for r in result["rows"]))
    variants = list(dict.fromkeys(r["variant"] for r in result["rows"]))
    found = {(r["name"], r["variant"]): r for r in result["rows"]}
    lines = []
    for name in rows:
        native = found.get((name, NATIVE))
        cells = [name.ljust(24)]
        for variant in variants:
            r = found.get((name, variant))
            cell = "-" if r is None else number(r["us"])
            if r is not None and native is not None and r is not native:
                same = "=" if r["plan"] == native["plan"] else ""
                cell += f" ({r['us'] / native['us']:.2f}x{same})"
            cells.append(cell.rjust(max(len(variant), 16)))
        lines.append(" ".join(cells))
    head = " ".join(["row".ljust(24), *(v.rjust(max(len(v), 16)) for v in variants)])
    return "\n".join([head, *lines])


_FEW_ROWS = 16  # packed rows a request up to which the kernel must be bound by memory
_LOADS_FROM_BYTES = 8e6


def verdicts(result: dict) -> list[str]:
    """One line for each bound of the project: met, or missed and by how much."""
    lines = []
    found = {(r["name"], r["variant"]): r for r in result["rows"]}

    def judge(what: str, value: float, bound: float, unit: str) -> None:
        state = "met" if value <= bound else f"MISSED by {100 * (value / bound - 1):.0f} %"
        lines.append(f"{what}: {number(value)}{unit} (at most {number(bound)}{unit}): {state}")

    for (name, variant), r in found.items():
        few = r["heads"] * r["qo_len"] <= _FEW_ROWS
        native = found.get((name, NATIVE))
        if variant == NATIVE:
            if r["target_us"] is not None:
                judge(f"{name}", r["us"], r["target_us"], " us")
            if few and r["loads_only_us"] and r["gbps"] * r["us"] * 1e3 >= _LOADS_FROM_BYTES:
                judge(f"{name} against loads only", r["us"] / r["loads_only_us"], 1.08, "x")
        elif native is not None and variant == "smem100k-1cta" and few:
            judge(f"{name} with the 100 KB tiles, one CTA an SM", r["us"] / native["us"], 1.35, "x")
        elif variant == "bits" and (name, "mma") in found:  # the same tiles, which convert
            us = found[name, "mma"]["us"]
            judge(f"{name} with bit placement", r["us"] / us, 1.2, "x")
    return lines


def feeding(result: dict) -> list[str]:
    """Bandwidth an SM with one CTA of the 100 KB tiles, and what real parts can feed an SM."""
    reached = [
        r
        for r in result["rows"]
        if r["variant"] == "smem100k-1cta" and r["heads"] * r["qo_len"] <= _FEW_ROWS
    ]
    if not reached:
        return []
    best = max(reached, key=lambda r: r["gbps_per_sm"])
    lines = [
        f"One CTA an SM reaches {best['gbps_per_sm']:.1f} GB/s an SM here ({best['name']}); "
        "a 100 KB part can feed an SM (datasheet bandwidth / SMs):"
    ]
    for part in PARTS_100K:
        lines.append(
            f"  {part.name} (SM{part.sm}): {part.gbps_per_sm:.1f} GB/s, "
            f"{best['gbps_per_sm'] / part.gbps_per_sm:.1f}x less than reached here"
        )
    return lines


def host_lines(result: dict) -> list[str]:
    """The costs on the host, ours beside upstream's FA2 with a BF16 cache."""
    host = result["host"]
    if host is None:
        return []
    run_us = host["run_us"]
    lines = [
        f"run() on the host: {number(run_us['ours'])} us, upstream {number(run_us['upstream'])} us"
    ]
    for plan in host["plan_us"]:
        state = "met" if plan["ours"] <= plan["upstream"] else "MISSED"
        lines.append(
            f"plan, batch {plan['batch']}: {number(plan['ours'])} us, "
            f"upstream {number(plan['upstream'])} us: {state}"
        )
    return lines


def not_measured(result: dict) -> dict[str, str]:
    """What could not run -> why; a reason that holds for every row is given once."""
    reasons = dict(result["unavailable"])
    rows = [r for r in result["rows"] if r["variant"] == NATIVE]
    for name in dict.fromkeys(name for r in rows for name in r["unavailable"]):
        by_row = {r["name"]: r["unavailable"].get(name) for r in rows}
        if len(set(by_row.values())) == 1:
            reasons[name] = by_row.popitem()[1]
        else:
            reasons.update({f"{row} {name}": why for row, why in by_row.items() if why})
    return reasons
