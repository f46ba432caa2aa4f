"""The resource table reads the compiler's report and fails on what it must fail on."""

import dataclasses
import json
from pathlib import Path

import pytest
from mla_fp8kv_build import arch, cli, env, resources, toolchain
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.toolchain import Nvrtc, Toolkit

TILE = "NS_4TileILi{rows}ELi4ELi64ELi2ELi1ELi2ELi64ELb{scales}ELb0EEE"
KERNEL = "_ZN9mla_fp8kv16attention_kernelI" + TILE + "LNS_6FormatE0ELb0EEEvNS_6ParamsE"
MERGE = "_ZN9mla_fp8kv12merge_kernelILi{rows}ELb{scales}EEEvNS_6ParamsE"
TOOLKIT = Toolkit(Path("/cuda"), "13.0.88")
NVRTC = Nvrtc(Path("/cuda/libnvrtc.so.12"), "12.8.93")


def report(symbol: str, stack=0, stores=0, loads=0, registers=168, shared="") -> str:
    return (
        "ptxas info    : 0 bytes gmem\n"
        f"ptxas info    : Compiling entry function '{symbol}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {symbol}\n"
        f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers{shared}, 400 bytes cmem[0]\n"
    )


def row(name: str, text: str, dynamic: int, threads: int = 128) -> resources.Row:
    (one,) = arch.parse_list(name)
    (entry,) = resources.parse_report(text)
    return resources._row(TOOLKIT.name, one, resources.Module("e4m3", 64), entry, dynamic, threads)


def test_a_report_becomes_entries():
    text = report(KERNEL.format(rows=16, scales=1), shared=", 1024 bytes smem") + report(
        MERGE.format(rows=64, scales=0), registers=96
    )
    attention, merge = resources.parse_report(text)
    assert attention == resources.Entry(
        kernel="mla_fp8kv::attention_kernel<mla_fp8kv::Tile<16, 4, 64, 2, 1, 2, 64, true, false>, "
        "(mla_fp8kv::Format)0, false>",
        variant="attention 16 rows, 2 slots, group scales",
        tile="mla_fp8kv::Tile<16, 4, 64, 2, 1, 2, 64, true, false>",
        rows=16,
        registers=168,
        spill_bytes=0,
        local_bytes=0,
        static_shared=1024,
    )
    assert (merge.variant, merge.tile, merge.registers) == ("merge 64 rows", "", 96)


@pytest.mark.parametrize("text", ["", "ptxas info    : Compiling entry function 'x' for 'sm_90a'"])
def test_a_report_of_another_form_is_an_error(text):
    with pytest.raises(BuildError, match="not in the form"):
        resources.parse_report(text)


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(BuildError, match="does not know the kernel other"):
        resources.parse_report(report("_Z5otheri"))


def test_spills_and_local_memory_are_problems():
    symbol = KERNEL.format(rows=8, scales=0)
    assert row("90a", report(symbol), 85_728).problem == ""
    assert row("90a", report(symbol, stack=16, stores=12, loads=12), 85_728).problem == "spills"
    assert row("90a", report(symbol, stack=16), 85_728).problem == "uses local memory"
    large = row("90a", report(symbol, stack=16, stores=12, loads=12), 232_449)
    assert (large.problem, large.spill_bytes) == ("", 24)


@pytest.mark.parametrize(
    ("name", "rows", "sizes", "problems"),
    [
        ("86", 32, [101_376], [""]),
        ("86", 32, [101_377], ["does not fit"]),
        ("120a", 8, [85_696, 104_128], ["", ""]),
        ("120a", 8, [104_128, 104_128], ["does not fit", "does not fit"]),
        ("120a", 64, [204_544], [""]),
        ("80", 64, [166_912], [""]),
        ("80", 64, [204_544], ["does not fit"]),
        ("90a", 64, [204_544], [""]),
        ("90a", 64, [232_449], ["does not fit"]),
    ],
)
def test_of_the_rows_a_gpu_needs_one_variant_must_fit(name, rows, sizes, problems):
    text = report(KERNEL.format(rows=rows, scales=0))
    found = resources.mark_misfits([row(name, text, size) for size in sizes])
    assert [one.problem for one in found] == problems


def test_variants_with_group_scales_are_needed_too():
    plain = row("86", report(KERNEL.format(rows=8, scales=0)), 90_000)
    scaled = row("86", report(KERNEL.format(rows=8, scales=1)), 110_000)
    assert [one.problem for one in resources.mark_misfits([plain, scaled])] == ["", "does not fit"]


def test_a_variant_that_does_not_fit_has_no_blocks_on_an_sm():
    found = row("86", report(KERNEL.format(rows=64, scales=0)), 204_544)
    assert (found.fits, found.ctas_per_sm) == (False, 0)


def test_static_and_dynamic_shared_memory_count_together():
    text = report(KERNEL.format(rows=8, scales=0), shared=", 1024 bytes smem")
    assert row("86", text, 101_376 - 1024).fits
    assert not row("86", text, 101_376 - 1023).fits


@pytest.mark.parametrize(
    ("name", "registers", "shared", "threads", "ctas"),
    [
        ("90a", 168, 85_728, 128, 2),  # by shared memory: 233,472 // 86,752
        ("90a", 255, 50_000, 128, 2),  # by registers: 65,536 // (256 * 128)
        ("86", 168, 85_728, 128, 1),
        ("90a", 255, 204_544, 256, 1),
        ("80", 168, 82_944, 128, 2),  # 167,936 // 83,968, to the byte
        ("80", 168, 82_945, 128, 1),
    ],
)
def test_blocks_an_sm_has_room_for(name, registers, shared, threads, ctas):
    text = report(KERNEL.format(rows=8, scales=0), registers=registers)
    assert row(name, text, shared, threads).ctas_per_sm == ctas


def test_dynamic_shared_memory_comes_from_the_kernels_traits():
    tile = "mla_fp8kv::Tiles<64>::Rows8"
    ((shared, threads),) = resources._launches([tile])
    # Q, two slots of 64 tokens x 576 B and P fit a block of the smallest GPU.
    assert 2 * 64 * 576 < shared <= 101_376 and threads % 32 == 0


def test_the_table_and_its_json_say_the_same():
    good = row("90a", report(KERNEL.format(rows=8, scales=0)), 85_728)
    bad = dataclasses.replace(good, problem="spills", spill_bytes=24)
    text = resources.show([good, bad])
    assert "e4m3 kpe 64  attention  8 rows, 2 slots  168   0" in text
    assert text.endswith("2 kernels on 1 architectures with nvcc 13.0.88: 1 with a problem")
    stored = json.loads(resources.as_json([good, bad]))
    assert stored["compilers"] == ["nvcc 13.0.88"]
    assert stored["rows"] == [dataclasses.asdict(good), dataclasses.asdict(bad)]


def test_what_compilers_do_differently_is_in_the_table():
    first = row("90a", report(KERNEL.format(rows=8, scales=0)), 85_728)
    second = row("86", report(KERNEL.format(rows=8, scales=0)), 85_728)
    same = dataclasses.replace(first, compiler=NVRTC.name)
    other = dataclasses.replace(second, compiler=NVRTC.name, registers=170)
    *lines, nvcc, nvrtc = resources.show([first, second, same, other]).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["sm_90a", "sm_86", "sm_86"]
    assert [line.rsplit("  ", 1)[1] for line in lines] == ["13.0.88 12.8.93", "13.0.88", "12.8.93"]
    assert nvcc.endswith("2 architectures with nvcc 13.0.88: 0 with a problem")
    assert nvrtc == (
        "2 kernels on 2 architectures with NVRTC 12.8.93: 0 with a problem, "
        "1 with other numbers than with nvcc 13.0.88 (registers +0 to +2)"
    )
    stored = json.loads(resources.as_json([first, same]))
    assert stored["compilers"] == [one["compiler"] for one in stored["rows"]]


def test_one_compilers_variant_does_not_fit_for_another():
    fits = row("86", report(KERNEL.format(rows=8, scales=0)), 90_000)
    text = report(KERNEL.format(rows=8, scales=0))
    large = dataclasses.replace(row("86", text, 110_000), compiler=NVRTC.name)
    assert [one.problem for one in resources.mark_misfits([fits, large])] == ["", "does not fit"]


class Compiler:
    """Stands in for a compiler that knows SM90."""

    def architectures(self):
        return {"90"}


class FakeNvcc(Compiler, Toolkit):
    """An nvcc that is asked nothing but what it knows."""


class FakeNvrtc(Compiler, Nvrtc):
    """An NVRTC that is asked nothing but what it knows."""


def test_other_compilers_get_the_kernels_that_nvcc_found(monkeypatch):
    nvcc, nvrtc = FakeNvcc(TOOLKIT.home, "13.0.88"), FakeNvrtc(NVRTC.library, "12.8.93")
    asked = []

    def compiled(one, module, compiler, includes, kernels):
        asked.append((module.name, compiler.name, kernels))
        spills = 8 if compiler is nvrtc and module.kpe else 0
        return report(MERGE.format(rows=8, scales=int(not module.kpe)), stack=spills, stores=spills)

    monkeypatch.setattr(resources, "_report", compiled)
    rows = resources.table(arch.parse_list("80,90a"), [nvcc, nvrtc], [])
    assert {name for name, compiler, _ in asked if compiler == nvcc.name} == {
        module.name for module in resources.modules(arch.parse_list("90a")[0])
    }
    its = {name: kernels for name, compiler, kernels in asked if compiler == nvrtc.name}
    assert its == {
        "e4m3 kpe 64": ["mla_fp8kv::merge_kernel<8, false>"],
        "e5m2 kpe 64": ["mla_fp8kv::merge_kernel<8, false>"],
        "e4m3 kpe 0": ["mla_fp8kv::merge_kernel<8, true>"],
        "e5m2 kpe 0": ["mla_fp8kv::merge_kernel<8, true>"],
    }
    assert {(one.compiler, one.module) for one in rows if one.problem == "spills"} == {
        (nvrtc.name, "e4m3 kpe 64"),
        (nvrtc.name, "e5m2 kpe 64"),
    }


def test_nvrtc_is_of_no_use_where_nvcc_knows_no_architecture():
    nvcc, nvrtc = FakeNvcc(TOOLKIT.home, "13.0.88"), FakeNvrtc(NVRTC.library, "12.8.93")
    with pytest.raises(BuildError, match="NVRTC 12.8.93 must be told the kernels, and nvcc 13.0"):
        resources.table(arch.parse_list("80"), [nvcc, nvrtc], [])


def test_the_command_fails_on_any_compilers_spills(tmp_path, monkeypatch, capsys):
    good = row("90a", report(KERNEL.format(rows=8, scales=0)), 85_728)
    bad = dataclasses.replace(good, compiler=NVRTC.name, problem="spills", spill_bytes=16)

    def table(archs, compilers, includes):
        assert [one.name for one in archs] == ["90a"]
        return [one for one in (good, bad) if one.compiler in [it.name for it in compilers]]

    monkeypatch.setattr(cli, "BUILD", tmp_path)
    monkeypatch.setattr(env, "ensure", lambda name: tmp_path)
    monkeypatch.setattr(toolchain, "find", lambda: TOOLKIT)
    monkeypatch.setattr(toolchain, "tvm_ffi_includes", lambda python: [])
    monkeypatch.setattr(toolchain, "releases", lambda: ["12.8", "13.0"])
    releases = {"12.8": NVRTC, "13.0": TOOLKIT}
    monkeypatch.setattr(toolchain, "of_release", releases.get)
    monkeypatch.setattr(resources, "table", table)
    command = ["resources", "--arch", "90a", "--json"]
    for more, status, compilers in [
        ([], 0, [TOOLKIT.name]),
        (["--compiler", "13.0"], 0, [TOOLKIT.name]),
        (["--compiler", "12.8"], 1, [TOOLKIT.name, NVRTC.name]),
        (["--compiler", "all"], 1, [TOOLKIT.name, NVRTC.name]),
    ]:
        assert cli.main([*command, *more]) == status
        assert json.loads(capsys.readouterr().out)["compilers"] == compilers


def test_every_module_is_compiled_for_every_architecture():
    for one in arch.SUPPORTED:
        names = {(m.kv_format, m.kpe, m.bits) for m in resources.modules(one)}
        shipped = {(f, k, False) for f in ("e4m3", "e5m2") for k in (64, 0)}
        assert shipped <= names
        assert (("e4m3", 64, True) in names) == (one.name == "90a")


@pytest.mark.parametrize("text", ["90a", "sm_90a", "9.0a", "90", "SM90"])
def test_names_of_an_architecture(text):
    (found,) = arch.parse_list(text)
    assert (found.name, found.flashinfer) == ("90a", "9.0a")


def test_lists_of_architectures():
    assert [one.flashinfer for one in arch.parse_list("80, 120a 10.0a")] == [
        "8.0",
        "12.0a",
        "10.0a",
    ]
    with pytest.raises(BuildError, match="Architecture 75 is not supported; supported are 80, 86"):
        arch.parse_list("80,75")
