"""What every shipped kernel variant takes of every GPU: registers, spills, shared memory.

The variants are those that the compiler reports: the sources instantiate what they ship, and a
report of anything that was not asked about cannot be missed. Dynamic shared memory, which only a
launch knows, comes from the kernel's own traits, evaluated by a host program. Other compilers than
the installed one get the same kernels, because registers and spills are a compiler's choice.
"""

import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mla_fp8kv_build import files, nvrtc
from mla_fp8kv_build.arch import SMEM_RESERVED, Arch
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import BUILD, PACKAGE, cache
from mla_fp8kv_build.toolchain import Nvrtc, Toolkit

_KERNEL = PACKAGE / "kernel"
_SOURCE = _KERNEL / "binding" / "mla_fp8kv_run.cu"
# The most rows of which a tile must fit under a limit of shared memory, in bytes a block.
_ROWS_THAT_FIT = {101_376: 32, 166_912: 64, 232_448: 64}


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

    compiler: str
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


def table(archs: list[Arch], compilers: list[Toolkit | Nvrtc], includes: list[Path]) -> list[Row]:
    """One row for each variant, module, architecture and compiler; compiles what is not kept.

    The first compiler is an nvcc: it compiles the sources, and finds what kernels they ship.
    """
    rows = []
    kernels: dict[str, list[str]] = {}  # template instances of a module
    for compiler in compilers:
        if isinstance(compiler, Nvrtc) and not rows:
            raise BuildError(
                f"{compiler.name} must be told the kernels, and {compilers[0].name}, which finds "
                "them, has none of these architectures."
            )
        known = compiler.architectures()
        jobs = [
            (arch, module)
            for arch in archs
            if arch.name.rstrip("a") in known
            for module in modules(arch)
            # Only tests run that form, with the compiler of their machine.
            if not (module.bits and rows)
        ]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            reports = [
                pool.submit(_report, *job, compiler, includes, kernels.get(job[1].name, []))
                for job in jobs
            ]
        parsed = [parse_report(report.result()) for report in reports]
        tiles = sorted({entry.tile for entries in parsed for entry in entries if entry.tile})
        launches = dict(zip(tiles, _launches(tiles), strict=True))
        for (arch, module), entries in zip(jobs, parsed, strict=True):
            kernels.setdefault(module.name, [entry.kernel for entry in entries])
            rows += [
                _row(compiler.name, arch, module, entry, *launches.get(entry.tile, (0, 0)))
                for entry in sorted(entries, key=lambda entry: (not entry.tile, entry.variant))
                if "Wgmma" not in entry.tile or arch.name == "90a"  # elsewhere a trap
            ]
    return mark_misfits(rows)


def _report(
    arch: Arch,
    module: Module,
    compiler: Toolkit | Nvrtc,
    includes: list[Path],
    kernels: list[str],
) -> str:
    """ptxas's report of one module on one architecture, kept in the cache."""
    if isinstance(compiler, Nvrtc):
        key = [files.sha256(Path(nvrtc.__file__)), *kernels]
        command = [*compiler.command, str(_KERNEL), arch.name, *kernels]
    else:
        key = [
            *("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xptxas", "-v"),
            *module.macros,
        ]
        include = [word for path in includes for word in ("-isystem", str(path))]
        command = [
            *(str(compiler.nvcc), "-cubin", f"-arch=sm_{arch.name}", "-o", os.devnull, *key),
            *(*include, f"-I{_KERNEL}", str(_SOURCE)),
        ]
    sources = files.sha256_tree(files.source_files(_KERNEL), _KERNEL)
    digest = hashlib.sha256("\0".join([sources, compiler.name, arch.name, *key]).encode())
    kept = cache() / "resources" / f"{digest.hexdigest()[:24]}.txt"
    if kept.is_file():
        return kept.read_text()
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        errors = [line for line in result.stdout.splitlines() if "error" in line]
        first = errors[0].strip() if errors else f"exit status {result.returncode}"
        raise BuildError(
            f"{module.name} does not compile for sm_{arch.name} with {compiler.name}: {first}."
        )
    with files.new_file(kept) as partial:
        partial.write_text(result.stdout)
    return result.stdout


@dataclass(frozen=True)
class Entry:
    """One kernel in a ptxas report.

    kernel: the template instance in C++. tile: its type argument that says how it is launched.
    """

    kernel: str
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
_TILE = re.compile(r"mla_fp8kv::(Wgmma)?Tile<[^>]*>")


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
                kernel=name.removeprefix("void ").partition("(mla_fp8kv::Params)")[0],
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
    kernel = re.search(r"mla_fp8kv::(\w+?)(_staggered)?(_kernel)?<", name)
    if not kernel:
        raise BuildError(f"'resources' does not know the kernel {name}.")
    arguments = re.split(r",\s*", (tile or name[: name.index(">")]).partition("<")[2].rstrip(">"))
    rows = int(arguments[0].rpartition("<")[2])
    if "WgmmaTile<" in tile:
        return f"{kernel[1]} {rows:2} rows, wgmma"
    scaled = arguments[7 if tile else -1] == "true"
    slots = f", {arguments[3]} slots" if tile else ""
    wide = ", wide" if tile and (rows, arguments[1]) == (32, "8") else ""
    return f"{kernel[1]} {rows:2} rows{slots}{wide}{', group scales' if scaled else ''}"


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


def _row(
    compiler: str, arch: Arch, module: Module, entry: Entry, dynamic: int, threads: int
) -> Row:
    shared = entry.static_shared + dynamic
    fits = shared <= arch.smem_limit
    problem = ""  # what does not fit is never launched and may spill
    if fits and entry.spill_bytes:
        problem = "spills"
    elif fits and entry.local_bytes:
        problem = "uses local memory"
    return Row(
        compiler=compiler,
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
        return row.compiler, row.arch, row.module, row.tile_rows, "group scales" in row.variant

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


def show(rows: list[Row]) -> str:
    """The table, with a summary line for each compiler below it.

    Compilers with the same numbers share a line, so that a kernel has more than one where compilers
    differ.
    """
    head = ("arch", "module", "variant", "regs", "spill", "local", "smem", "limit", "CTAs/SM")
    place: dict[tuple, int] = {}
    compilers: dict[Row, list[str]] = {}
    for row in rows:
        place.setdefault(_kernel(row), len(place))
        compilers.setdefault(replace(row, compiler=""), []).append(row.compiler.split()[-1])
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
            " ".join(compilers[row]),
            row.problem or ("" if row.fits else "too large here"),
        )
        for row in sorted(compilers, key=lambda row: place[_kernel(row)])
    ]
    head = (*head, "compilers", "")
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    text = [
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *lines]
    ]
    return "\n".join([*text, *_summaries(rows)])


def _kernel(row: Row) -> tuple:
    return row.arch, row.module, row.variant


def _numbers(row: Row) -> tuple:
    return row.registers, row.spill_bytes, row.local_bytes, row.ctas_per_sm


def _summaries(rows: list[Row]) -> list[str]:
    by_compiler: dict[str, list[Row]] = {}
    for row in rows:
        by_compiler.setdefault(row.compiler, []).append(row)
    first = next(iter(by_compiler), "")
    usual = {_kernel(row): row for row in by_compiler.get(first, [])}
    lines = []
    for compiler, its in by_compiler.items():
        archs = len({row.arch for row in its})
        bad = sum(bool(row.problem) for row in its)
        line = f"{len(its)} kernels on {archs} architectures with {compiler}: {bad} with a problem"
        if compiler != first:
            pairs = [(row, usual[_kernel(row)]) for row in its if _kernel(row) in usual]
            other = sum(_numbers(row) != _numbers(than) for row, than in pairs)
            more = [row.registers - than.registers for row, than in pairs] or [0]
            line += f", {other} with other numbers than with {first}"
            line += f" (registers {min(more):+} to {max(more):+})"
        lines.append(line)
    return lines


def as_json(rows: list[Row]) -> str:
    """The table for programs, each compiler's rows one after the other."""
    compilers = list(dict.fromkeys(row.compiler for row in rows))
    return json.dumps({"compilers": compilers, "rows": [asdict(row) for row in rows]}, indent=1)
