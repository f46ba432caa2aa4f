"""The PIN file of a FlashInfer release: what is built on, to the byte."""

import re
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import ROOT

PINS = ROOT / "third_party" / "flashinfer"
DEFAULT_BASE = "0.7.2"


@dataclass(frozen=True)
class Pin:
    """One supported release, as its PIN file says."""

    name: str
    version: str
    sdist: str
    sha256: str
    licence: str
    local: int

    @property
    def wheel_version(self) -> str:
        """Version of our distribution; PEP 440 lets it satisfy `==version`."""
        return f"{self.version}+mlafp8.{self.local}"

    @property
    def stem(self) -> str:
        """Name of the sdist's top folder."""
        return self.sdist.removesuffix(".tar.gz")

    @property
    def pristine(self) -> Path:
        """Folder with upstream's files as they are."""
        return PINS / self.stem

    @property
    def patched(self) -> Path:
        """Folder with the patches applied, to read and to edit."""
        return PINS / f"{self.stem}+mlafp8"

    @property
    def patches(self) -> Path:
        """Folder of the series for this release."""
        return ROOT / "patches" / self.version


def supported() -> list[str]:
    """Versions that have a PIN file, oldest first."""
    return sorted(
        (path.stem for path in PINS.glob("*.toml")),
        key=lambda version: [int(part) for part in re.findall(r"\d+", version)],
    )


def load(version: str) -> Pin:
    """The pin of a release, or a sentence that names the supported ones."""
    path = PINS / f"{version}.toml"
    if not path.is_file():
        raise BuildError(
            f"FlashInfer {version} has no PIN file; supported are {', '.join(supported())}."
        )
    try:
        return Pin(**tomllib.loads(path.read_text()))
    except (TypeError, tomllib.TOMLDecodeError) as error:
        raise BuildError(f"{path.name} is not a valid PIN file: {error}.") from error
