"""`python -m mla_fp8kv doctor` without a GPU: what is there, what is missing, and the verdict."""

import subprocess
import sys
from pathlib import Path

import pytest
from mla_fp8kv import __main__, doctor, gpus, installed, sglang_patch, sglang_source

H200 = gpus.Gpu("NVIDIA H200", (9, 0), 132, 232448)
RTX_PRO_6000 = gpus.Gpu("NVIDIA RTX PRO 6000", (12, 0), 188, 101376)
T4 = gpus.Gpu("Tesla T4", (7, 5), 40, 65536)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine where all is well; tests take away or change one thing each."""

    class Machine:
        gpus = [H200]
        versions = {"torch": "2.14.1", "flashinfer-python": "0.7.2+mlafp8.1"}
        packages = {name: tmp_path / name for name in ("torch", "flashinfer")}

        def add_sglang(self, version, plugins=True):
            root = tmp_path / "sglang"
            (root / sglang_source.FILE).parent.mkdir(parents=True)
            (root / sglang_source.FILE).write_text("pass\n")
            if plugins:
                (root / "srt" / "plugins").mkdir()
            self.versions = {**self.versions, "sglang": version}
            self.packages = {**self.packages, "sglang": root}

        def states(self):
            return {line.name: line.state for line in doctor.lines()}

        def text(self, name):
            return "\n".join(line.text for line in doctor.lines() if line.name == name)

    made = Machine()
    for root in made.packages.values():
        root.mkdir()
    (made.packages["torch"] / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    (made.packages["flashinfer"] / "mla.py").write_text("import mla_fp8kv.backend\n")
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "workspace"))
    for name in ("SGLANG_PLUGINS", "MLA_FP8KV_SGLANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "query", lambda: ("13.0", made.gpus))
    monkeypatch.setattr(installed, "version", lambda name: made.versions.get(name))
    monkeypatch.setattr(installed, "package_dir", lambda name: made.packages.get(name))
    return made


def test_all_is_well(machine, capsys):
    assert __main__.main(["doctor"]) == 0
    screen = capsys.readouterr().out
    assert "FP8 KV for MLA will work here" in screen
    assert "NVIDIA H200, sm_90, 132 SMs, 232,448 B shared memory a block" in screen
    assert len(screen.splitlines()) <= 24, "one screen"
    assert all(len(line) <= 160 for line in screen.splitlines())


def test_tile_follows_the_shared_memory_limit(machine):
    assert "up to 64 rows" in machine.text("GPU")
    machine.gpus = [RTX_PRO_6000]
    assert "up to 32 rows" in machine.text("GPU")


@pytest.mark.parametrize("gpu", [T4, gpus.Gpu("small", (8, 9), 20, 65536)])
def test_unsupported_gpu(machine, gpu, capsys):
    machine.gpus = [gpu]
    assert doctor.main() == 1
    assert "will not work here: see GPU." in capsys.readouterr().out


def test_no_driver(machine, monkeypatch):
    def none():
        raise gpus.NoDriver("no driver.")

    monkeypatch.setattr(gpus, "query", none)
    assert machine.states()["GPU"] == doctor.BAD


def test_no_device(machine):
    machine.gpus = []
    assert machine.states()["GPU"] == doctor.BAD


@pytest.mark.parametrize("name, line", [("torch", "torch"), ("flashinfer", "FlashInfer")])
def test_package_missing(machine, name, line):
    machine.packages = {k: v for k, v in machine.packages.items() if k != name}
    assert machine.states()[line] == doctor.BAD


def test_torch_without_cuda(machine):
    (machine.packages["torch"] / "version.py").write_text("cuda: Optional[str] = None\n")
    assert "without CUDA" in machine.text("torch")
    assert machine.states()["torch"] == doctor.BAD


def test_stock_flashinfer(machine):
    (machine.packages["flashinfer"] / "mla.py").write_text("pass\n")
    assert "is not our build" in machine.text("FlashInfer")
    assert machine.states()["FlashInfer"] == doctor.BAD


@pytest.mark.parametrize(
    "version, state", [("0.7.2", doctor.GOOD), ("0.7.2+cu130", doctor.GOOD), ("0.7.1", doctor.NOTE)]
)
def test_prebuilt_kernels_match_upstreams_version(machine, version, state):
    machine.versions = {**machine.versions, "flashinfer-jit-cache": version}
    assert machine.states()["jit-cache"] == state


def test_a_cache_that_cannot_be_written(machine, tmp_path, capsys):
    workspace = tmp_path / "workspace"
    assert machine.text("cache") == str(workspace / ".cache" / "flashinfer")
    assert not workspace.exists(), "doctor changes nothing"
    workspace.touch()
    assert machine.text("cache") == (
        f"16 MB cannot be written to {workspace}/.cache/flashinfer (Not a directory); set "
        "FLASHINFER_WORKSPACE_BASE to a directory that has room and can be written"
    )
    assert doctor.main() == 1
    assert "will not work here: see cache." in capsys.readouterr().out


def test_no_nvcc_matters_only_without_modules(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert machine.states()["nvcc"] == doctor.BAD
    name = "mla_fp8kv_1_kv_e4m3_kpe_64"
    module = tmp_path / f"workspace/.cache/flashinfer/0.7.2/90a/cached_ops/{name}/{name}.so"
    module.parent.mkdir(parents=True)
    module.touch()
    assert machine.states()["nvcc"] == doctor.NOTE
    assert machine.text("modules") == str(module)


def test_old_nvcc(machine):
    nvcc = Path(machine.packages["torch"]).parent / "cuda" / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'release 12.6, V12.6.1'\n")
    assert "12.6, tested is 12.8 and newer" in machine.text("nvcc")


@pytest.fixture
def entry_point(monkeypatch):
    point = doctor.importlib.metadata.EntryPoint(
        "mla_fp8kv", "mla_fp8kv.sglang:activate", "sglang.srt.plugins"
    )
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [point])


def test_sglang_with_other_code(machine, entry_point):
    machine.add_sglang("0.5.23")
    assert "0.5.23 would keep its cast: FlashInferMLAAttnBackend.forward_extend is" in machine.text(
        "SGLang"
    )


@pytest.mark.parametrize(
    "variable, value, expected",
    [
        ("MLA_FP8KV_SGLANG", "0", "MLA_FP8KV_SGLANG=0 turns the plug-in off."),
        ("SGLANG_PLUGINS", "a, b", "SGLANG_PLUGINS=a, b does not name mla_fp8kv."),
        ("SGLANG_PLUGINS", "a, mla_fp8kv", "forward_extend is expected once"),
    ],
)
def test_sglang_switches(machine, entry_point, monkeypatch, variable, value, expected):
    machine.add_sglang("0.5.23")
    monkeypatch.setenv(variable, value)
    assert expected in machine.text("SGLang")


def test_sglang_without_our_entry_point(machine, monkeypatch):
    machine.add_sglang("0.5.23")
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert "no entry point of ours" in machine.text("SGLang")


@pytest.mark.parametrize(
    "version, expected",
    [("0.5.9", "run 'python -m mla_fp8kv sglang-patch'"), ("0.5.8", "is not supported")],
)
def test_sglang_before_plugins(machine, version, expected):
    machine.add_sglang(version, plugins=False)
    assert expected in machine.text("SGLang")


def test_patched_sglang(machine, monkeypatch):
    machine.add_sglang("0.5.9", plugins=False)
    monkeypatch.setattr(sglang_patch, "is_applied", lambda version, file: True)
    assert machine.text("SGLang") == "0.5.9 is patched"


def test_needs_no_torch():
    """In an interpreter that has nothing but this package, as a process of its own."""
    code = (
        "import sys\n"
        "for name in ('torch', 'flashinfer', 'sglang', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "from mla_fp8kv import __main__\n"
        "sys.exit(__main__.main(['doctor']))\n"
    )
    package = str(Path(doctor.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": package, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr == ""
    for line in ("torch       MISSING", "FlashInfer  MISSING", "will not work here: see"):
        assert line in done.stdout


def test_verify_stops_where_doctor_finds_nothing(machine, monkeypatch, capsys):
    machine.gpus = []
    assert __main__.main(["verify"]) == 1
    assert "GPU         MISSING" in capsys.readouterr().out


def test_sglang_patch_says_why_not(machine, capsys):
    assert __main__.main(["sglang-patch"]) == 1
    assert capsys.readouterr().err == "error: SGLang is not installed beside this package.\n"
