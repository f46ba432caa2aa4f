"""Times each step and prints it, so that a slow build says where it spent its time."""

import contextlib
import time
from collections.abc import Iterator


class Steps:
    """Collects (name, seconds, note) of what ran."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, str]] = []

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Time a block; the list it yields takes words to print behind the time."""
        notes: list[str] = []
        start = time.monotonic()
        yield notes
        seconds = time.monotonic() - start
        self.rows.append((name, seconds, " ".join(notes)))
        print(f"  {name:<10} {seconds:6.1f} s  {' '.join(notes)}", flush=True)

    def total(self) -> float:
        """Seconds of all steps."""
        return sum(seconds for _, seconds, _ in self.rows)
