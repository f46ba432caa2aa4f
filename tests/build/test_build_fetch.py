"""Fetching, verifying and unpacking: what comes in is the pinned sdist or one sentence."""

import io
import shutil
import subprocess
import tarfile

import pytest
from invented import TREE
from mla_fp8kv_build import fetch, files, unpack
from mla_fp8kv_build.errors import BuildError


def test_a_local_sdist_is_verified_and_used(release, sdist, monkeypatch):
    monkeypatch.setenv("FLASHINFER_SDIST", str(sdist))
    assert fetch.fetch(release) == sdist


def test_a_local_sdist_with_other_bytes(release, sdist, monkeypatch):
    sdist.write_bytes(sdist.read_bytes() + b"x")
    monkeypatch.setenv("FLASHINFER_SDIST", str(sdist))
    with pytest.raises(BuildError) as error:
        fetch.fetch(release)
    assert str(error.value) == (
        f"The hash of {sdist} differs: pinned is {release.sha256}, found is {files.sha256(sdist)}."
    )


def test_a_local_sdist_that_is_not_there(release, monkeypatch):
    monkeypatch.setenv("FLASHINFER_SDIST", "/nowhere/x.tar.gz")
    with pytest.raises(BuildError, match="names /nowhere/x.tar.gz, which is not a file"):
        fetch.fetch(release)


def test_no_network_and_no_local_sdist(release, monkeypatch, tmp_path):
    """The real pip, with an index where nobody answers."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(BuildError) as error:
        fetch.fetch(release)
    sentence = str(error.value)
    assert sentence.startswith("No network and no local sdist: flashinfer-python==9.9.9 could not")
    assert sentence.endswith("set FLASHINFER_SDIST to a copy of flashinfer_python-9.9.9.tar.gz.")
    assert "\n" not in sentence
    kept = tmp_path / "cache" / "downloads"
    assert [path.name for path in kept.iterdir()] == ["flashinfer_python-9.9.9.tar.lock"]


def test_an_index_with_other_bytes(release, sdist, monkeypatch, tmp_path):
    """The real pip, with a folder as its index: it compares before it runs anything."""
    ran = tmp_path / "ran"
    links = tmp_path / "links"
    links.mkdir()
    with tarfile.open(links / sdist.name, "w:gz") as archive:
        setup = f"open({str(ran)!r}, 'w')\n".encode()
        member = tarfile.TarInfo("flashinfer_python-9.9.9/setup.py")
        member.size = len(setup)
        archive.addfile(member, io.BytesIO(setup))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(BuildError) as error:
        fetch.fetch(release)
    found = files.sha256(links / sdist.name)
    assert str(error.value) == (
        f"The hash of {sdist.name} differs: pinned is {release.sha256}, found is {found}."
    )
    assert not ran.exists()


def test_a_download_is_kept_and_used_again(release, sdist, monkeypatch):
    calls = []

    def fake_pip(python, *arguments):
        calls.append(arguments)
        shutil.copy(sdist, arguments[arguments.index("-d") + 1])
        return subprocess.CompletedProcess([python], 0, "")

    monkeypatch.setattr(fetch, "run_pip", fake_pip)
    first = fetch.fetch(release)
    assert fetch.fetch(release) == first and len(calls) == 1
    first.write_bytes(b"damaged")
    assert files.sha256(fetch.fetch(release)) == release.sha256 and len(calls) == 2


def test_unpack_makes_the_pristine_tree(release, sdist):
    unpack.unpack(release, sdist)
    assert unpack.unpacked(release)
    for name, text in TREE.items():
        assert (release.pristine / name).read_text() == text


def test_another_sdist_is_another_tree(release, sdist):
    unpack.unpack(release, sdist)
    (release.pristine / ".sdist.sha256").write_text("0" * 64)
    assert not unpack.unpacked(release)


@pytest.mark.parametrize("name", ["elsewhere/file", "flashinfer_python-9.9.9/../../escaped"])
def test_an_archive_may_not_leave_its_folder(release, tmp_path, name):
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((BuildError, tarfile.TarError)):
        unpack.unpack(release, tmp_path / "bad.tar.gz")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupted_unpack_leaves_the_old_tree(release, sdist, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "extractall", interrupted)
    with pytest.raises(KeyboardInterrupt):
        unpack.unpack(release, sdist)
    assert (release.pristine / "flashinfer/mla.py").exists()
    assert [path.name for path in release.pristine.parent.iterdir()] == [release.pristine.name]
