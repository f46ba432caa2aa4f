"""Nothing half-made stays behind, and a full disk is one sentence."""

import errno
import multiprocessing
import os
import shutil
import signal
import time
from collections import namedtuple

import pytest
from mla_fp8kv_build import cli, files, wheel
from mla_fp8kv_build.errors import BuildError


def test_a_directory_appears_when_it_is_whole(tmp_path):
    final = tmp_path / "tree"
    with files.new_directory(final) as directory:
        (directory / "file").write_text("new")
        assert not final.exists()
    assert (final / "file").read_text() == "new"


def test_a_failure_keeps_the_old_directory(tmp_path):
    final = tmp_path / "tree"
    with files.new_directory(final) as directory:
        (directory / "file").write_text("old")
    with pytest.raises(RuntimeError), files.new_directory(final) as directory:
        (directory / "file").write_text("half")
        raise RuntimeError
    assert (final / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [final]


def _die_inside(final):
    with files.new_directory(final) as directory:
        (directory / "half").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_is_cleaned_up_by_the_next(tmp_path):
    final = tmp_path / "tree"
    process = multiprocessing.get_context("fork").Process(target=_die_inside, args=(final,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and not final.exists()
    with files.new_directory(final) as directory:
        assert list(directory.iterdir()) == []
    assert list(tmp_path.iterdir()) == [final]


def test_a_file_appears_when_it_is_whole(tmp_path):
    final = tmp_path / "wheel.whl"
    with pytest.raises(RuntimeError), files.new_file(final) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with files.new_file(final) as partial:
        partial.write_text("whole")
    assert final.read_text() == "whole" and list(tmp_path.iterdir()) == [final]


def _append_slowly(lock, log):
    with files.lock(lock):
        with log.open("a") as stream:
            stream.write("enter\n")
        time.sleep(0.2)
        with log.open("a") as stream:
            stream.write("leave\n")


def test_two_runs_take_turns(tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = (tmp_path / "lock", tmp_path / "log")
    runs = [context.Process(target=_append_slowly, args=arguments) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert arguments[1].read_text() == "enter\nleave\n" * 2


def test_too_little_space_is_refused_before_the_start(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 5 * 10**8))
    with pytest.raises(BuildError) as error:
        files.need_space(tmp_path, 2, "building the wheel")
    assert str(error.value) == (
        f"Disk full: building the wheel needs 2 GB in {tmp_path}, which has 0.5 GB."
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_during_the_build(monkeypatch, capsys, number):
    def full(*_):
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr(wheel, "build", full)
    assert cli.main([]) == 1
    sentence = capsys.readouterr().err
    assert sentence.startswith("error: Disk full while writing some/file; the build needs")
    assert sentence.count("\n") == 1


def test_an_interruption_is_one_word(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel, "build", interrupted)
    assert cli.main([]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_other_errors_of_the_system_are_not_hidden(monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(wheel, "build", denied)
    with pytest.raises(PermissionError):
        cli.main([])


def test_hashes_see_names_and_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    first = files.sha256_tree(files.source_files(tmp_path), tmp_path)
    (tmp_path / "b").rename(tmp_path / "c")
    second = files.sha256_tree(files.source_files(tmp_path), tmp_path)
    (tmp_path / "c").write_text("c")
    third = files.sha256_tree(files.source_files(tmp_path), tmp_path)
    assert len({first, second, third}) == 3


def test_sources_leave_out_caches(tmp_path):
    tmp_path = tmp_path / ".hidden" / "checkout"  # a checkout may lie in such a folder
    tmp_path.mkdir(parents=True)
    for name in ("x.py", "__pycache__/x.pyc", ".ruff_cache/file", "y.pyc"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    assert files.source_files(tmp_path) == [tmp_path / "x.py"]
