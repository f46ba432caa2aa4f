"""What the NVIDIA driver says about the GPUs, asked through ctypes: no torch, no CUDA toolkit."""

import ctypes
from dataclasses import dataclass

_SM_COUNT, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 75, 76, 97  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """A CUDA device. `shared_bytes` is the opt-in limit of shared memory a block."""

    name: str
    capability: tuple[int, int]
    sms: int
    shared_bytes: int


class NoDriver(Exception):
    """The driver cannot be asked; the message is one sentence."""


def query() -> tuple[str, list[Gpu]]:
    """(CUDA version of the driver, devices); NoDriver where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoDriver("The NVIDIA driver (libcuda.so.1) is not installed.") from error

    def call(name: str, *arguments) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            raise NoDriver(f"The NVIDIA driver answers {name} with error {status}.")

    def number(name: str, *arguments) -> int:
        value = ctypes.c_int()
        call(name, ctypes.byref(value), *arguments)
        return value.value

    call("cuInit", 0)
    version = number("cuDriverGetVersion")
    devices = []
    for index in range(number("cuDeviceGetCount")):
        device = number("cuDeviceGet", index)
        name = ctypes.create_string_buffer(256)
        call("cuDeviceGetName", name, len(name), device)
        major, minor, sms, shared = (
            number("cuDeviceGetAttribute", attribute, device)
            for attribute in (_MAJOR, _MINOR, _SM_COUNT, _SHARED_OPTIN)
        )
        devices.append(Gpu(name.value.decode(), (major, minor), sms, shared))
    return f"{version // 1000}.{version % 1000 // 10}", devices
