"""Python environments of our own, in the cache directory; the user's interpreter is left alone.

Run as `python -m mla_fp8kv_build.env build` by build.sh, before any dependency is there: this
module and what it imports use the standard library only.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from mla_fp8kv_build import files
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import COMPILERS, ROOT, cache

REQUIREMENTS = {
    "build": ROOT / "python" / "mla_fp8kv_build" / "requirements.txt",
    "dev": ROOT / "requirements-dev.txt",
    "sglang": ROOT / "requirements-sglang.txt",
    "nvcc": ROOT / "requirements-nvcc.txt",
    **{f"cuda-{path.stem}": path for path in sorted(COMPILERS.glob("*.txt"))},
}
# Asking an sdist of FlashInfer for its metadata runs upstream's build hooks; these are upstream's
# own switches against compiling libraries and installing packages there.
UPSTREAM_SWITCHES = {"BUILD_NVEP": "0", "FLASHINFER_BUILD_NO_PIP": "1"}
_GIGABYTES = {"build": 0.1, "dev": 3, "sglang": 14}  # others 1


def pip_error(output: str) -> str:
    """The line of pip's output that says what went wrong."""
    if "No space left on device" in output:
        return "the disk is full"
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if "ERROR: " in line]
    return errors[-1].strip().rstrip(".") if errors else "pip failed without a reason"


def run_pip(python: Path | str, *arguments: str) -> subprocess.CompletedProcess:
    """Run pip of an environment, with its output captured as text in `stdout`."""
    return subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", *arguments],
        env={**os.environ, **UPSTREAM_SWITCHES},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _key(requirements: Path) -> str:
    digest = hashlib.sha256(requirements.read_bytes())
    digest.update(f"{sys.version} {sys.base_prefix}".encode())
    return digest.hexdigest()[:12]


def ensure(name: str) -> Path:
    """The interpreter of the named environment, which is made on first use.

    An environment is never changed: other requirements or another Python make another one.
    """
    requirements = REQUIREMENTS[name]
    directory = cache() / "envs" / f"{name}-{_key(requirements)}"
    python = directory / "bin" / "python"
    with files.lock(directory.with_suffix(".lock")):
        # A venv cannot be renamed, so it is made in place and this file says that it is whole.
        complete = directory / "complete"
        if complete.exists():
            return python
        files.need_space(directory.parent, _GIGABYTES.get(name, 1), f"the {name} environment")
        print(f"making the {name} environment in {directory}", file=sys.stderr, flush=True)
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if made.returncode:
            raise BuildError(
                f"{sys.executable} cannot make a virtual environment in {directory}; "
                "is its venv module installed (python3-venv)?"
            )
        installed = run_pip(python, "install", "--no-input", "-r", str(requirements))
        if installed.returncode:
            raise BuildError(
                f"The {name} environment could not be made: {pip_error(installed.stdout)}; without "
                "a network let PIP_NO_INDEX=1 and PIP_FIND_LINKS name a folder with the wheels of "
                f"{requirements.relative_to(ROOT)}."
            )
        complete.touch()
    return python


def main(name: str) -> int:
    """Print the interpreter of the named environment."""
    try:
        print(ensure(name))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
