"""pytest plug-in: says, under the results, how many GPU tests were skipped and why."""

from collections import Counter


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Count skips of tests marked `gpu` by their reason."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        # A module that skips itself as a whole has no keywords, only a path.
        if "gpu" in getattr(report, "keywords", report.nodeid)
        and isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} GPU tests skipped: {reason}")
