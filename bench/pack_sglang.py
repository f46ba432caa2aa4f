"""Packs the few SGLang files that the GPU test and the step benchmark need.

    python bench/pack_sglang.py SOURCE [-o build/sglang-slim]

SOURCE is a sglang wheel or an installed sglang package. The result is under 2 MB and travels to a
server without network; there, set MLA_FP8KV_SGLANG_TREE to it, or leave it in build/sglang-slim.
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "sglang"))
from slim_sglang import FILES  # noqa: E402


def read_source(source: Path) -> tuple[str, dict[str, bytes]]:
    """(SGLang's version, file below the package -> bytes)."""
    if source.suffix == ".whl":
        with zipfile.ZipFile(source) as archive:
            return source.name.split("-")[1], {
                name: archive.read(f"sglang/{name}") for name in FILES
            }
    versions = [info.name for info in source.parent.glob("sglang-*.dist-info")]
    if len(versions) != 1:
        raise SystemExit(f"{source} must be a wheel or an installed sglang package.")
    version = re.fullmatch(r"sglang-(.+)\.dist-info", versions[0])[1]
    return version, {name: (source / name).read_bytes() for name in FILES}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "sglang-slim")
    options = parser.parse_args(argv)
    version, files = read_source(options.source)
    for name, data in files.items():
        target = options.output / "sglang" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        # Namespace packages would lose to an installed sglang, so every folder is a real one.
        for folder in target.parents:
            if folder == options.output:
                break
            (folder / "__init__.py").touch()
    info = options.output / f"sglang-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    print(f"packed {len(files)} files of sglang {version} into {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
