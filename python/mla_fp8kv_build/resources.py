"""What every shipped kernel variant takes of every GPU: registers, spills, shared memory.

The variants are those that the compiler reports: the sources instantiate what they ship, and a
report of anything that was not asked about cannot be missed. Dynamic shared memory, which only a
launch knows, comes from the kernel's own traits, evaluated by a host program.
"""

import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mla_fp8kv_build import files
from mla_fp8kv_build.arch import SMEM_RESERVED, Arch
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import BUILD, PACKAGE, cache
from mla_fp8kv_build.toolchain import Toolkit

_KERNEL = PACKAGE / "kernel"
_SOURCE = _KERNEL / "binding" / "mla_fp8kv_run.cu"
# The most rows of which a tile must fit under a limit of shared memory, in bytes a block.
_ROWS_THAT_FIT = {101_376: 32, 166_912: 32, 232_448: 64}


@dataclass(frozen=True)
class Module:
    """One compiled module: KV format, head_dim_kpe, and whether bits are placed by hand."""

    kv_format: str
    kpe: int
    bits: bool = False

    @property
    def name(self) -> str:
        """Short name for the table."""
        return f"{self.kv_format} kpe {self.kpe}{' bits' if self.bits else ''}"

    @property
    def macros(self) -> list[str]:
        """What the sources want defined."""
        return [
            f"-DMLA_FP8KV_E5M2={int(self.kv_format == 'e5m2')}",
            f"-DMLA_FP8KV_KPE={self.kpe}",
            f"-DMLA_FP8KV_DEQUANT_BITS={int(self.bits)}",
        ]


@dataclass(frozen=True)
class Row:
    """One kernel variant on one architecture. Sizes are bytes; registers are a thread's.

    tile_rows is 0 for kernels without a tile. ctas_per_sm is what shared memory and registers leave
    room for, 0 where the launch decides (no tile) or where the variant does not fit: the plan takes
    only what fits, so that is no problem as long as another one of the same rows does.
    """

    module: str
    variant: str
    arch: str
    tile_rows: int
    registers: int
    spill_bytes: int
    local_bytes: int
    static_shared: int
    dynamic_shared: int
    shared_limit: int
    ctas_per_sm: int
    fits: bool
    problem: str


def modules(arch: Arch) -> list[Module]:
    """The modules to compile for an architecture.

    The bit-placing form is what SM80 and SM86 use anyway; beside the hardware conversion it is for
    tests, which run on SM90.
    """
    found = [Module(kv_format, kpe) for kv_format in ("e4m3", "e5m2") for kpe in (64, 0)]
    return found + [Module("e4m3", 64, bits=True)] * (arch.name == "90a")


def table(archs: list[Arch], toolkit: Toolkit, includes: list[Path]) -> list[Row]:
    """One row for each variant, module and architecture; compiles what is not in the cache."""
    known = toolkit.architectures()
    jobs = [
        (arch, module)
        for arch in archs
        if arch.name.rstrip("a") in known
        for module in modules(arch)
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(
            pool.map(lambda job: _report(job[0], job[1], toolkit, includes), jobs),
        )
    parsed = [parse_report(report) for report in reports]
    tiles = sorted({entry.tile for entries in parsed for entry in entries if entry.tile})
    launches = dict(zip(tiles, _launches(tiles), strict=True))
    rows = [
        _row(arch, module, entry, *launches.get(entry.tile, (0, 0)))
        for (arch, module), entries in zip(jobs, parsed, strict=True)
        for entry in sorted(entries, key=lambda entry: (not entry.tile, entry.variant))
    ]
    return mark_misfits(rows)


def _report(arch: Arch, module: Module, toolkit: Toolkit, includes: list[Path]) -> str:
    """ptxas's report of one module on one architecture, kept in the cache."""
    flags = [
        *("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xptxas", "-v"),
        *module.macros,
    ]
    sources = files.sha256_tree(files.source_files(_KERNEL), _KERNEL)
    key = hashlib.sha256("\0".join([sources, toolkit.version, arch.name, *flags]).encode())
    kept = cache() / "resources" / f"{key.hexdigest()[:24]}.txt"
    if kept.is_file():
        return kept.read_text()
    include = [word for path in includes for word in ("-isystem", str(path))]
    command = [
        *(str(toolkit.nvcc), "-cubin", f"-arch=sm_{arch.name}", "-o", os.devnull, *flags),
        *(*include, f"-I{_KERNEL}", str(_SOURCE)),
    ]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        errors = [line for line in result.stdout.splitlines() if "error" in line]
        first = errors[0].strip() if errors else f"exit status {result.returncode}"
        raise BuildError(f"{module.name} does not compile for sm_{arch.name}: {first}.")
    with files.new_file(kept) as partial:
        partial.write_text(result.stdout)
    return result.stdout


@dataclass(frozen=True)
class Entry:
    """One kernel in a ptxas report. `tile` is the C++ type that says how it is launched."""

    variant: str
    tile: str
    rows: int
    registers: int
    spill_bytes: int
    local_bytes: int
    static_shared: int


_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '\w+'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_TILE = re.compile(r"mla_fp8kv::Tile<[^>]*>")


def parse_report(report: str) -> list[Entry]:
    """The kernels of one ptxas report."""
    matches = list(_ENTRY.finditer(report))
    if len(matches) != report.count("Compiling entry function") or not matches:
        raise BuildError("ptxas's report is not in the form that 'resources' reads.")
    names = _demangle([match["symbol"] for match in matches])
    entries = []
    for match, name in zip(matches, names, strict=True):
        tile = _TILE.search(name)
        static = re.search(r"(\d+) bytes smem", match["rest"])
        entries.append(
            Entry(
                variant=_variant(name, tile.group() if tile else ""),
                tile=tile.group() if tile else "",
                rows=int(re.search(r"<(\d+)", tile.group()).group(1)) if tile else 0,
                registers=int(match["registers"]),
                spill_bytes=int(match["stores"]) + int(match["loads"]),
                local_bytes=int(match["stack"]),
                static_shared=int(static.group(1)) if static else 0,
            )
        )
    return entries


def _variant(name: str, tile: str) -> str:
    """What tells a kernel from the others of a module, out of its full C++ name."""
    kernel = re.search(r"mla_fp8kv::(\w+?)(_kernel)?<", name)
    if not kernel:
        raise BuildError(f"'resources' does not know the kernel {name}.")
    arguments = re.split(r",\s*", (tile or name[: name.index(">")]).partition("<")[2].rstrip(">"))
    rows, scaled = arguments[0].rpartition("<")[2], arguments[-1] == "true"
    slots = f", {arguments[3]} slots" if tile else ""
    return f"{kernel[1]} {int(rows):2} rows{slots}{', group scales' if scaled else ''}"


def _demangle(symbols: list[str]) -> list[str]:
    result = subprocess.run(["c++filt", *symbols], capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError("c++filt failed; 'resources' needs binutils.")
    return result.stdout.splitlines()


def _launches(tiles: list[str]) -> list[tuple[int, int]]:
    """(dynamic shared bytes, threads) of each tile type, asked of traits.cuh by a host program."""
    if not tiles:
        return []
    lines = "".join(
        f'  std::printf("%d %d\\n", {tile}::kSharedBytes, {tile}::kThreads);\n' for tile in tiles
    )
    with files.scratch_directory(BUILD / "traits") as directory:
        source = directory / "traits.cpp"
        source.write_text(f'#include <cstdio>\n#include "traits.cuh"\nint main() {{\n{lines}}}\n')
        binary = directory / "traits"
        result = subprocess.run(
            ["g++", "-std=c++17", f"-I{_KERNEL}", str(source), "-o", str(binary)],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise BuildError(f"traits.cuh does not compile on the host: {result.stderr[:200]}.")
        output = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout
    return [(int(shared), int(threads)) for shared, threads in map(str.split, output.splitlines())]


def _row(arch: Arch, module: Module, entry: Entry, dynamic: int, threads: int) -> Row:
    shared = entry.static_shared + dynamic
    fits = shared <= arch.smem_limit
    problem = ""
    if entry.spill_bytes:
        problem = "spills"
    elif entry.local_bytes:
        problem = "uses local memory"
    return Row(
        module=module.name,
        variant=entry.variant,
        arch=arch.name,
        tile_rows=entry.rows,
        registers=entry.registers,
        spill_bytes=entry.spill_bytes,
        local_bytes=entry.local_bytes,
        static_shared=entry.static_shared,
        dynamic_shared=dynamic,
        shared_limit=arch.smem_limit,
        ctas_per_sm=_ctas_per_sm(arch, entry.registers, shared, threads) if threads and fits else 0,
        fits=fits,
        problem=problem,
    )


def mark_misfits(rows: list[Row]) -> list[Row]:
    """The rows, with a problem where no variant of a number of rows fits that has to."""

    def group(row: Row) -> tuple:
        return row.arch, row.module, row.tile_rows, "group scales" in row.variant

    fitting = {group(row) for row in rows if row.fits}
    return [
        replace(row, problem=row.problem or "does not fit")
        if row.tile_rows <= _ROWS_THAT_FIT[row.shared_limit] and group(row) not in fitting
        else row
        for row in rows
    ]


def _ctas_per_sm(arch: Arch, registers: int, shared: int, threads: int) -> int:
    """Blocks an SM has room for: its shared memory, and 65,536 registers given out 256 a warp."""
    warp_registers = -(-registers * 32 // 256) * 256
    by_registers = 65_536 // (warp_registers * (threads // 32))
    return min(arch.smem_per_sm // (shared + SMEM_RESERVED), by_registers)


def show(rows: list[Row], toolkit: Toolkit) -> str:
    """The table, with a summary line below it."""
    head = ("arch", "module", "variant", "regs", "spill", "local", "smem", "limit", "CTAs/SM", "")
    lines = [
        (
            f"sm_{row.arch}",
            row.module,
            row.variant,
            str(row.registers),
            str(row.spill_bytes),
            str(row.local_bytes),
            str(row.static_shared + row.dynamic_shared),
            str(row.shared_limit),
            str(row.ctas_per_sm or "-"),
            row.problem or ("" if row.fits else "too large here"),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    text = "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *lines]
    )
    bad = sum(bool(row.problem) for row in rows)
    archs = len({row.arch for row in rows})
    return (
        f"{text}\n{len(rows)} kernels on {archs} architectures with nvcc {toolkit.version}: "
        f"{bad} with a problem"
    )


def as_json(rows: list[Row], toolkit: Toolkit) -> str:
    """The table for programs."""
    return json.dumps({"nvcc": toolkit.version, "rows": [asdict(row) for row in rows]}, indent=1)
