"""Lets the tests here import their modules, and compiles what they need side by side."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("kernel_call")


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Every kernel variant of a `case` parameter; the other tests mostly use the same ones."""
    from host_library import compile_library, forget_old_libraries
    from kernel_call import Case, defines_of

    forget_old_libraries()
    parameters = (getattr(item, "callspec", None) for item in request.session.items)
    cases = [p.params["case"] for p in parameters if p and isinstance(p.params.get("case"), Case)]
    variants = {tuple(sorted(defines_of(case).items())) for case in cases}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = [pool.submit(compile_library, "kernel_runner.cpp", dict(v)) for v in variants]
    for task in tasks:
        task.result()
