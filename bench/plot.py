"""Draws the roofline and the bars of a result file: python bench/plot.py [FILE] [--format svg|png].

Writes <file>-roofline.<format> and <file>-bars.<format> beside FILE (default: the only result in
bench/results).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter
from mla_bench import results
from mla_bench.rows import NATIVE

# Okabe and Ito's palette, told apart with any colour vision; the markers and the order differ, too.
OURS = "#0072B2"
BARS = {
    "cast+fa2": ("pool cast to BF16 + FA2", "#999999"),
    "gather+cast+fa2": ("gather + cast + FA2", "#C8C8C8"),
    "fa2-bf16": ("FA2, BF16 pool", "#E69F00"),
    "fa3-bf16": ("FA3, BF16 pool", "#56B4E9"),
    "fa3-fp8": ("FA3, FP8 pool (upstream)", "#CC79A7"),
    "flashmla-bf16": ("FlashMLA, BF16 pool", "#009E73"),
    "sglang-triton-fp8": ("SGLang Triton, FP8 pool", "#D55E00"),
}
POINTS = {"fa2-bf16": ("s", "#E69F00"), "fa3-bf16": ("^", "#56B4E9")}


def shape_label(row: dict) -> str:
    """A row in words, short: "8 heads, 32 x 8,192"."""
    text = f"{row['heads']} heads, {row['batch']} x {row['kv_len']:,}"
    return text + (f", {row['qo_len']} queries" if row["qo_len"] > 1 else "")


def title(result: dict) -> str:
    machine = result["machine"]
    return f"{machine['gpu']}, {machine.get('date', '')[:10]}"


def plain_numbers(axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def core_rows(result: dict) -> list[dict]:
    return [r for r in result["rows"] if r["variant"] == NATIVE and r["group"] == "core"]


def bars(result: dict):
    """Time of a layer for each core row: ours and each baseline, with the memory floor."""
    rows = core_rows(result)
    peers = [name for name in BARS if any(name in row["baselines"] for row in rows)]
    half = -(-len(rows) // 2)
    height = 1 + half * (0.13 * (len(peers) + 1) + 0.1)
    figure, columns = plt.subplots(1, 2, figsize=(13, height), sharex=True)
    for axes, part in zip(columns, (rows[:half], rows[half:]), strict=True):
        _bar_groups(axes, part, peers)
    longest = max(us for row in rows for us in (row["us"], *row["baselines"].values()))
    columns[0].set_xlim(1, 1.8 * longest)
    figure.suptitle(
        f"MLA attention over an FP8 pool of 495,552 tokens, {title(result)}", fontsize=11
    )
    handles, labels = columns[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _bar_groups(axes, rows: list[dict], peers: list[str]) -> None:
    """One group of bars a row, the baselines in `peers` order from the top, ours last."""
    thickness = 0.82 / (len(peers) + 1)
    for place, name in enumerate([*peers, None]):
        label, color = BARS[name] if name else ("this project, FP8 pool", OURS)
        times = [row["baselines"].get(name, 0.0) if name else row["us"] for row in rows]
        places = [index - 0.41 + (place + 0.5) * thickness for index in range(len(rows))]
        axes.barh(places, times, thickness * 0.9, color=color, label=label)
        for y, us in zip(places, times, strict=True):
            if us:
                weight = "normal" if name else "bold"
                axes.text(us * 1.05, y, results.number(us), va="center", size=6.5, weight=weight)
    # Below a microsecond the floor says nothing beside launch and merge.
    floors = [(i, row["floor_us"]) for i, row in enumerate(rows) if row["floor_us"] >= 1]
    if floors:
        at, us = zip(*floors, strict=True)
        low, high = [i - 0.44 for i in at], [i + 0.44 for i in at]
        label = "floor: KV bytes / copy bandwidth"
        axes.vlines(us, low, high, color="black", linewidth=1.4, label=label)
    axes.set_yticks(range(len(rows)), [shape_label(row) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.set_xlabel("µs a layer (log scale), shorter is better")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def spread_out(values: list[float], factor: float) -> list[float]:
    """Ascending positive `values`, moved up where neighbours differ by less than `factor`."""
    placed: list[float] = []
    for value in values:
        placed.append(max(value, placed[-1] * factor) if placed else value)
    return placed


def roofline(result: dict):
    """TFLOPS over the FLOP a shape has for each byte of FP8 KV, one column for each row count.

    Peers with a BF16 pool stand in the column of their shape, under a roof of their own: they have
    to read twice the bytes.
    """
    rows = core_rows(result)
    copy, gemm = result["copy_gbps"] / 1e3, result["gemm_tflops"]  # TB/s, TFLOPS
    knee = gemm / copy

    columns: dict[int, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["tflops"]):
        columns.setdefault(row["heads"] * row["qo_len"], []).append(row)
    intensity = {row["name"]: row["tflops"] * 1e3 / row["gbps"] for row in rows}
    left, right = min(intensity.values()) / 2, max(2 * knee, *intensity.values()) * 5
    peers = [(row["tflops"], row["ratios"].get(peer, 1)) for row in rows for peer in POINTS]
    low = min(tflops / max(ratio, 1) for tflops, ratio in peers) / 4

    figure, axes = plt.subplots(figsize=(9, 6))
    roofs = (("-", 1, f"copy bandwidth: {copy:.2f} TB/s"), (":", 2, "the same, BF16 pool"))
    for style, share, label in roofs:
        corners = [left, share * knee, right]
        heights = [left * copy / share, gemm, gemm]
        axes.plot(corners, heights, style, color="black", linewidth=1.3, label=label)
    axes.text(
        right / 1.1, gemm * 1.1, f"BF16 matrix product: {gemm:.0f} TFLOPS", ha="right", size=8
    )

    for peer, (marker, color) in POINTS.items():
        theirs = [
            (intensity[row["name"]], row["tflops"] / row["ratios"][peer])
            for row in rows
            if peer in row["ratios"]
        ]
        if theirs:
            x, y = zip(*theirs, strict=True)
            axes.scatter(x, y, marker=marker, color=color, s=24, label=BARS[peer][0])
    x, y = [intensity[row["name"]] for row in rows], [row["tflops"] for row in rows]
    axes.scatter(x, y, color=OURS, s=36, zorder=3, label="this project, FP8 pool")

    for count, column in columns.items():
        places = spread_out([row["tflops"] for row in column], 1.25)
        for row, y in zip(column, places, strict=True):
            x = intensity[row["name"]]
            text = f"{row['batch']} x {row['kv_len']:,}"
            axes.annotate(
                text,
                (x, row["tflops"]),
                (x * 1.13, y),
                va="center",
                fontsize=7,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
                arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#777777"},
            )
        x = intensity[column[0]["name"]]
        axes.text(x, low * 1.1, f"{count:,} rows", rotation=90, ha="center", va="bottom", size=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(low, gemm * 2)
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    axes.set_xlabel("FLOP for each byte of FP8 KV; rows = heads x queries of a request")
    axes.set_ylabel("TFLOPS")
    axes.set_title(f"Roofline, {title(result)}", fontsize=11)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="result file")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(argv)
    folder = Path(__file__).resolve().parent / "results"
    found = [options.file] if options.file else sorted(folder.glob("*.json"))
    found = [path for path in found if options.file or ".partial" not in path.name]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        print(f"plot: name one result file; bench/results has {names}.", file=sys.stderr)
        return 2
    try:
        result = results.load(found[0])
    except (OSError, ValueError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 1
    if not core_rows(result):
        print(f"plot: {found[0].name} has no core rows of the native kernel.", file=sys.stderr)
        return 1
    plt.rcParams.update({"figure.constrained_layout.use": True, "svg.hashsalt": "mla-fp8kv"})
    for name, draw in (("roofline", roofline), ("bars", bars)):
        path = found[0].with_name(f"{found[0].stem}-{name}.{options.format}")
        metadata = {"Date": None} if options.format == "svg" else None
        draw(result).savefig(path, dpi=160, metadata=metadata)
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
