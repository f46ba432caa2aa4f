"""The checker of this folder turns red for a plan.h with one wrong line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plan_checker import KERNEL_DIR

MUTATIONS = {
    "last row tile too tall": ("std::min(tile.rows, rows - begin)", "tile.rows"),
    "mask by the first row": ("(begin + t.rows - 1) / in.num_heads", "begin / in.num_heads"),
    "mask one token short": ("- qo_len + last_query + 1)", "- qo_len + last_query)"),
    "last tokens dropped": ("(t.kv_end + tile.tokens - 1) / tile.tokens", "t.kv_end / tile.tokens"),
    "tokens beyond kv_len": ("end == t.kv_tiles ? t.kv_end : end", "end"),
    "first piece not partial": ("if (begin > 0 || end < t.kv_tiles) {", "if (begin > 0) {"),
    "merge from the wrong slot": ("t.rows, num_slots, 0", "t.rows, 0, 0"),
    "further items found late": ("if (work.more_count++ == 0) work", "++work.more_count, work"),
    "unseen rows merge a slot": ("t.rows, 0, 0, {}}", "t.rows, 0, 1, {}}"),
    "pages of the neighbour": ("= in.kv_indptr[t.request]", "= in.kv_indptr[t.request + 1]"),
    "stale records": (
        "std::memset(base, 0, merge_offset(grid) + least_merge_items(grid) * item_bytes);",
        "",
    ),
    "stale merge items": (
        "merge_offset(grid) + least_merge_items(grid) * item_bytes);",
        "merge_offset(grid));",
    ),
    "merge items misplaced": ("(base + merge_offset(grid))", "(base + merge_offset(grid) + 16)"),
    "too few partials shared out": ("(2 * kFewPartials * std::max", "(3 * kFewPartials * std::max"),
    "tiny pieces": ("return item_units / kTileUnits + 1;", "return 1;"),
    "one piece at any price": ("<= even + line.item_units / kTileUnits", "<= 9 * even"),
    "capacity beyond the grid": ("counter.last_cta < grid ?", "counter.last_cta < 2 * grid ?"),
    "writes past the workspace": (
        "if (staged_bytes > staged_capacity)",
        "if (staged_bytes > staged_capacity + 1)",
    ),
}


def run_samples(build_dir, kernel_dir):
    script = Path(__file__).with_name("plan_samples.py")
    return subprocess.run(
        [sys.executable, str(script), str(build_dir), str(kernel_dir), "80", "-O0"],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_unmutated(tmp_path):
    run = run_samples(tmp_path, KERNEL_DIR)
    assert run.returncode == 0, run.stderr[-1000:]


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name, tmp_path):
    old, new = MUTATIONS[name]
    for header in ("params.h", "plan.h", "plan_registry.h"):
        shutil.copy(KERNEL_DIR / header, tmp_path)
    source = (tmp_path / "plan.h").read_text()
    assert source.count(old) == 1, "the line to mutate is gone or not unique: adapt the list"
    (tmp_path / "plan.h").write_text(source.replace(old, new))
    run = run_samples(tmp_path, tmp_path)
    assert "CalledProcessError" not in run.stderr, "does not compile"
    assert run.returncode != 0, "survived"
