"""Facts of the machine and the build, for the head of a result file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[2]
_CLOCKS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
)


def commit() -> str:
    """Commit of the tree: MLA_FP8KV_COMMIT, git, or the COMMIT file of a bundle; else "unknown"."""
    if given := os.environ.get("MLA_FP8KV_COMMIT"):
        return given
    if (_ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    file = _ROOT / "COMMIT"
    return file.read_text().strip() if file.exists() else "unknown"


def _nvidia_smi(*fields: str, meanwhile=lambda: time.sleep(0.01)) -> dict[str, str]:
    """What nvidia-smi says about the GPU in use, or {}; `meanwhile` runs until it answers."""
    if not shutil.which("nvidia-smi"):
        return {}
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = [
        "nvidia-smi",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader",
        f"--id={uuid}",
    ]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            meanwhile()
        values = process.stdout.read().strip().split(", ")
    return dict(zip(fields, values, strict=True)) if process.returncode == 0 else {}


def clocks_under_load() -> dict[str, str]:
    """Clocks and power as nvidia-smi reads them while the GPU copies."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return _nvidia_smi(*_CLOCKS, meanwhile=copy)


def facts() -> dict:
    """GPU, driver, CUDA, versions, commit, clocks and date."""
    import flashinfer  # an offline bundle has the package without its distribution's metadata

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "smem_per_block_optin": properties.shared_memory_per_block_optin,
        "driver": _nvidia_smi("driver_version").get("driver_version", "unknown"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "flashinfer": _version("flashinfer-python", flashinfer.__version__),
        "flash_mla": _version("sgl-flash-mla"),
        "sglang": _version("sglang"),
        "commit": commit(),
        "clocks_under_load": clocks_under_load(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _version(distribution: str, otherwise: str = "not installed") -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return otherwise


def slug(gpu: str) -> str:
    """File name of a GPU's results: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
