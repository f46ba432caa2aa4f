"""Checks a built wheel against the pristine tree: nothing lost, nothing changed but the series."""

import base64
import configparser
import hashlib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.specifiers import SpecifierSet

from mla_fp8kv_build import overlay, series
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import PACKAGE
from mla_fp8kv_build.pin import Pin, tomllib


def check(pin: Pin, wheel: Path, ours: dict[str, bytes]) -> None:
    """Raise BuildError with the faults of the wheel, or return; `ours` is what was added to it."""
    with zipfile.ZipFile(wheel) as archive:
        problems = [
            *metadata_problems(pin, archive),
            *record_problems(pin, archive),
            *content_problems(pin, archive, ours),
        ]
    if problems:
        raise BuildError(f"The wheel is not as it should be: {'; '.join(problems[:5])}.")


def metadata_problems(pin: Pin, archive: zipfile.ZipFile) -> list[str]:
    """Name, version, dependencies and entry points."""
    info = overlay.dist_info(pin, pin.wheel_version)
    metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
    upstream = HeaderParser().parsestr((pin.pristine / "PKG-INFO").read_text())
    problems = []
    if metadata["Name"] != pin.name:
        problems.append(f"its name is {metadata['Name']}")
    if metadata["Version"] != pin.wheel_version:
        problems.append(f"its version is {metadata['Version']}")
    elif not SpecifierSet(f"=={pin.version}").contains(metadata["Version"]):
        problems.append(f"its version does not satisfy =={pin.version}")
    for field in ("Requires-Dist", "Requires-Python", "Provides-Extra"):
        if sorted(metadata.get_all(field, [])) != sorted(upstream.get_all(field, [])):
            problems.append(f"its {field} differs from upstream's")
    entries = configparser.ConfigParser()
    entries.read_string(archive.read(f"{info}/entry_points.txt").decode())
    ours = configparser.ConfigParser()
    ours.read_string(overlay.ENTRY_POINTS)
    for group in ours.sections():
        if group not in entries or dict(entries[group]) != dict(ours[group]):
            problems.append(f"it lacks the entry point group {group}")
    if "console_scripts" not in entries:
        problems.append("it lacks upstream's console script")
    return problems


def record_problems(pin: Pin, archive: zipfile.ZipFile) -> list[str]:
    """RECORD names each member once, with its hash and size."""
    record_name = f"{overlay.dist_info(pin, pin.wheel_version)}/RECORD"
    lines = archive.read(record_name).decode().splitlines()
    record = {name: (sha, size) for name, sha, size in (line.rsplit(",", 2) for line in lines)}
    names = archive.namelist()
    problems = []
    if len(set(names)) != len(names) or len(record) != len(lines) or set(names) != set(record):
        problems.append("its RECORD and its members differ")
    for name in set(names) & set(record) - {record_name}:
        data = archive.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if record[name] != (f"sha256={digest}", str(len(data))):
            problems.append(f"RECORD is wrong about {name}")
    return problems


def content_problems(pin: Pin, archive: zipfile.ZipFile, ours: dict[str, bytes]) -> list[str]:
    """Each member is ours, or upstream's to the byte, or patched to the recorded hash."""
    touched = series.expected(pin)
    info = overlay.dist_info(pin, pin.wheel_version)
    folders = _package_dirs(pin)
    problems = []
    sources = set()
    for name in archive.namelist():
        data = archive.read(name)
        if name in ours:
            if data != ours[name]:
                problems.append(f"{name} differs from the checkout")
            continue
        if name.startswith(f"{info}/"):
            continue
        source = _source(name, folders)
        sources.add(source)
        if source in touched:
            if hashlib.sha256(data).hexdigest() != touched[source]:
                problems.append(f"{name} is not as the series leaves it")
        elif not (pin.pristine / source).is_file():
            problems.append(f"{name} is neither ours nor upstream's")
        elif data != (pin.pristine / source).read_bytes():
            problems.append(f"{name} differs from upstream's")
    problems += [f"it lacks {name}" for name in sorted(set(ours) - set(archive.namelist()))]
    problems += [f"it lacks the patched {path}" for path in sorted(set(touched) - sources)]
    upstream = {
        path.relative_to(pin.pristine).as_posix()
        for path in (pin.pristine / "flashinfer").rglob("*.py")
        if (path.parent / "__init__.py").is_file()
    }
    problems += [f"it lacks upstream's {path}" for path in sorted(upstream - sources)]
    version = f'__version__ = "{pin.version}"'
    if version not in archive.read("flashinfer/_build_meta.py").decode():
        problems.append(f"flashinfer.__version__ is not {pin.version}")
    if f"{PACKAGE.name}/__init__.py" not in ours:
        problems.append(f"{PACKAGE.name} is not a package")
    return problems


def _package_dirs(pin: Pin) -> dict[str, str]:
    """Package folder in the wheel -> folder in the tree, where upstream's pyproject differs."""
    project = tomllib.loads((pin.pristine / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"].get("package-dir", {})
    return {package.replace(".", "/"): folder for package, folder in folders.items()}


def _source(name: str, folders: dict[str, str]) -> str:
    """Path in the tree of a member of the wheel: the longest package-dir prefix decides."""
    for package in sorted(folders, key=len, reverse=True):
        if name.startswith(f"{package}/"):
            rest = name.removeprefix(f"{package}/")
            return rest if folders[package] == "." else f"{folders[package]}/{rest}"
    return name
