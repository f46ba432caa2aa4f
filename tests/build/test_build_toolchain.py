"""nvcc is found where a toolkit is, and otherwise comes from the package index."""

import pytest
from invented import write
from mla_fp8kv_build import env, toolchain
from mla_fp8kv_build.errors import BuildError

NVCC = """#!/bin/sh
case $1 in
  --version) echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
  --list-gpu-code) printf 'sm_80\\nsm_90\\nsm_120\\n' ;;
  *) exit 1 ;;
esac
"""


def fake_toolkit(home, header=True):
    write(home / "bin" / "nvcc", NVCC)
    (home / "bin" / "nvcc").chmod(0o755)
    if header:
        write(home / "include" / "cuda_runtime.h", "")
    return home


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A machine without any nvcc."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(toolchain, "_DEFAULT_HOME", tmp_path / "default")
    return tmp_path


def test_cuda_home_comes_first(nowhere, monkeypatch):
    home = fake_toolkit(nowhere / "mine")
    fake_toolkit(nowhere / "default")
    monkeypatch.setenv("CUDA_HOME", str(home))
    found = toolchain.find()
    assert (found.home, found.version) == (home, "13.0.88")
    assert found.architectures() == {"80", "90", "120"}


def test_a_wrapper_script_on_the_path_is_not_a_toolkit(nowhere, monkeypatch):
    wrapper = fake_toolkit(nowhere / "usr-local", header=False)
    monkeypatch.setenv("PATH", f"{wrapper / 'bin'}:/usr/bin:/bin")
    fake_toolkit(nowhere / "default")
    assert toolchain.find().home == nowhere / "default"


def test_the_index_is_the_last_resort(nowhere, monkeypatch):
    environment = nowhere / "nvcc-env"
    home = environment / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13"
    fake_toolkit(home)
    write(home / "lib" / "libcudart.so.13", "")
    asked = []
    python = environment / "bin" / "python"
    monkeypatch.setattr(env, "ensure", lambda name: asked.append(name) or python)
    for _ in range(2):
        found = toolchain.find()
        assert found.home == home
        assert (found.libraries / "libcudart.so.13").exists() and found.libraries.name == "lib64"
    assert asked == ["nvcc", "nvcc"]


def test_other_releases_come_from_the_index(nowhere, monkeypatch):
    asked = []

    def ensure(name):
        asked.append(name)
        return nowhere / name / "bin" / "python"

    packages = "lib/python3.11/site-packages/nvidia"
    fake_toolkit(nowhere / "cuda-13.5" / packages / "cu13")
    library = nowhere / "cuda-12.8" / packages / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    write(library, "")
    write(library.with_name("libnvrtc.alt.so.12"), "")
    monkeypatch.setattr(env, "ensure", ensure)
    assert toolchain.of_release("13.5").name == "nvcc 13.0.88"  # what the fake one says
    old = toolchain.of_release("12.8")
    assert (old.library, old.name) == (library, "NVRTC 12.8.93")
    assert asked == ["cuda-13.5", "cuda-12.8"]
    assert set(asked) <= set(env.REQUIREMENTS)


def test_a_release_without_a_compiler():
    with pytest.raises(BuildError, match="CUDA 11.8 is not .* they are 12.8, 12.9, 13.5"):
        toolchain.of_release("11.8")


def test_a_compiler_that_does_not_run(nowhere, monkeypatch):
    home = fake_toolkit(nowhere / "broken")
    write(home / "bin" / "nvcc", "#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("CUDA_HOME", str(home))
    with pytest.raises(BuildError, match="nvcc --version failed"):
        toolchain.find()
