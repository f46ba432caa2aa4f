"""The source patches: they fit the real files, and do what the plug-in does."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import releases
from mla_fp8kv import installed, sglang_patch, sglang_source
from mla_fp8kv_build import overlay

FILE = releases.BACKEND
VERSIONS = sorted(sglang_patch.available())


@pytest.fixture(scope="session")
def wheels():
    """Backend file of each release, from the real wheels."""
    return {version: releases.backend_file(version) for version in VERSIONS}


@pytest.fixture
def sglang_0_5_9(wheels, tmp_path, monkeypatch):
    """An installation that has 0.5.9's real backend file; its path."""
    root = tmp_path / "site" / "sglang"
    file = root / sglang_source.FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(wheels["0.5.9"])
    monkeypatch.setattr(installed, "package_dir", lambda name: root)
    monkeypatch.setattr(installed, "version", lambda name: "0.5.9")
    monkeypatch.setattr(installed, "flashinfer_is_ours", lambda: True)
    return file


@pytest.mark.parametrize("version", VERSIONS)
def test_header(version):
    header = sglang_patch.available()[version].read_text().partition("\ndiff --git ")[0]
    names = re.findall(r"^([A-Z][\w-]*): ", header, re.MULTILINE)
    assert names == [
        *("Subject", "Why", "Applies-to", "Before", "After", "Forwarded", "Dropped-when", "Test")
    ]
    assert f"Applies-to: sglang {version}" in header


@pytest.mark.parametrize("version", VERSIONS)
def test_applies_strictly(wheels, tmp_path, version):
    """By `patch` without fuzz, and by our own applier, with the same result."""
    file = tmp_path / "python" / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(wheels[version])
    patch_file = sglang_patch.available()[version]
    command = ["patch", "-p1", "-F0", "--no-backup-if-mismatch", "-i", str(patch_file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "offset" not in done.stdout, done.stdout
    patch = sglang_patch.Patch(patch_file)
    assert hashlib.sha256(wheels[version]).hexdigest() == patch.before
    assert patch.apply(wheels[version].decode()).encode() == file.read_bytes()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == patch.after


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plugin_would_refuse_the_patched_file(wheels, version):
    """So that nothing is done twice."""
    text = wheels[version].decode()
    sglang_source.Backend(text, FILE)
    patch = sglang_patch.Patch(sglang_patch.available()[version])
    with pytest.raises(sglang_source.Mismatch):
        sglang_source.Backend(patch.apply(text), FILE)


def test_apply_and_revert(sglang_0_5_9, wheels):
    assert sglang_patch.run().startswith("patched ")
    patched = sglang_0_5_9.read_text()
    assert patched.count("self.cache_dtype") == 8 and "get_key_buffer" in patched
    assert sglang_patch.run().endswith("is patched already.")
    assert sglang_patch.run(revert=True).startswith("restored ")
    assert sglang_0_5_9.read_bytes() == wheels["0.5.9"]
    assert [file.name for file in sglang_0_5_9.parent.iterdir()] == [sglang_0_5_9.name]
    assert sglang_patch.run(revert=True).endswith("is not patched.")


def refused(file, revert=False):
    """The sentence, after checking that no byte and no file changed."""
    before = {entry: entry.read_bytes() for entry in file.parent.iterdir()}
    with pytest.raises(sglang_patch.PatchError) as error:
        sglang_patch.run(revert)
    assert {entry: entry.read_bytes() for entry in file.parent.iterdir()} == before
    return str(error.value)


def test_refuses_an_edited_file(sglang_0_5_9):
    sglang_0_5_9.write_text(sglang_0_5_9.read_text() + "# mine\n")
    assert "is not the file of the release" in refused(sglang_0_5_9)


def test_refuses_to_revert_edits(sglang_0_5_9):
    sglang_patch.run()
    sglang_0_5_9.write_text(sglang_0_5_9.read_text() + "# mine\n")
    assert "was edited after it was patched" in refused(sglang_0_5_9, revert=True)
    assert "is not the file of the release" in refused(sglang_0_5_9)


def test_refuses_to_revert_without_backup(sglang_0_5_9):
    sglang_patch.run()
    next(sglang_0_5_9.parent.glob("*.before-mla-fp8kv")).unlink()
    assert "reinstall SGLang" in refused(sglang_0_5_9, revert=True)


def test_refuses_other_versions(sglang_0_5_9, monkeypatch):
    monkeypatch.setattr(installed, "version", lambda name: "0.5.8")
    assert "There is a patch for SGLang" in refused(sglang_0_5_9)


def test_refuses_where_the_plugin_works(sglang_0_5_9):
    (sglang_0_5_9.parents[2] / "plugins").mkdir()
    assert "loads our plug-in" in refused(sglang_0_5_9)


def test_refuses_without_our_flashinfer(sglang_0_5_9, monkeypatch):
    monkeypatch.setattr(installed, "flashinfer_is_ours", lambda: False)
    assert "install its wheel first" in refused(sglang_0_5_9)


def test_refuses_without_sglang(monkeypatch):
    monkeypatch.setattr(installed, "package_dir", lambda name: None)
    with pytest.raises(sglang_patch.PatchError, match="SGLang is not installed"):
        sglang_patch.run()


def test_patched_source_does_what_the_plugin_does(module, edited_module, load, pool):
    """Same plans, same cache handed to run(), same output, for every step."""
    torch = pytest.importorskip("torch")
    import stand_in
    import steps
    from test_plugin import backend_of

    recorded = []
    patch = sglang_patch.Patch(sglang_patch.available()["0.5.23"])
    patched = edited_module(patch.apply(Path(module.__file__).read_text()))
    pools = (pool(torch.float8_e4m3fn), pool(torch.float8_e5m2), pool(torch.bfloat16))
    wrapper = stand_in.CpuMlaWrapper
    for kind in (patched, module):
        if kind is module:
            sys.modules[module.__name__] = module
            sys.modules[module.__name__.rpartition(".")[0]].flashinfer_mla_backend = module
            load()
        rows = []
        for kv in pools:
            backend = backend_of(kind, kv)
            wrapper.plans.clear()  # without the plug-in's trial of the kernel
            wrapper.runs.clear()
            outputs = [step(backend) for step in steps.ALL.values()]
            rows.append(
                ([vars(p) for p in wrapper.plans], [vars(r) for r in wrapper.runs], outputs)
            )
        recorded.append(rows)
    for by_patch, by_plugin in zip(*recorded, strict=True):
        assert by_patch[:2] == by_plugin[:2]
        assert all(map(torch.equal, by_patch[2], by_plugin[2]))

    dsa = pool(use_dsa=True, override_kv_cache_dim=656)
    assert patched.mla_cache_dtype(stand_in.model_runner(dsa)) == torch.bfloat16


def test_wheel_carries_the_patches():
    """`patches/` is the one source: the build copies it into the package."""
    repository = Path(__file__).parents[2]
    shipped = overlay.package_files()
    for file in (repository / "patches" / "sglang").glob("*/*.patch"):
        name = f"mla_fp8kv/{file.relative_to(repository).as_posix()}"
        assert shipped[name] == file.read_bytes()
