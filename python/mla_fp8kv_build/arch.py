"""GPU architectures: their names, and how much shared memory they have."""

from dataclasses import dataclass

from mla_fp8kv_build.errors import BuildError

# Of the shared memory of an SM, what the driver takes for each block, in bytes.
SMEM_RESERVED = 1024


@dataclass(frozen=True)
class Arch:
    """A compile target: what follows sm_ in its name, and its shared memory in bytes.

    smem_limit: what one block can opt in to. smem_per_sm: what all blocks of an SM share.
    """

    name: str
    smem_limit: int
    smem_per_sm: int

    @property
    def flashinfer(self) -> str:
        """The same in FlashInfer's FLASHINFER_CUDA_ARCH_LIST, such as 9.0a."""
        digits = self.name.rstrip("a")
        return f"{digits[:-1]}.{digits[-1]}{self.name[len(digits) :]}"


SUPPORTED = (
    Arch("80", 166_912, 167_936),
    Arch("86", 101_376, 102_400),
    Arch("89", 101_376, 102_400),
    Arch("90a", 232_448, 233_472),
    Arch("100a", 232_448, 233_472),
    Arch("103a", 232_448, 233_472),
    Arch("120a", 101_376, 102_400),
    Arch("121a", 101_376, 102_400),
)


def parse_list(text: str) -> list[Arch]:
    """Architectures of a comma-separated list; 90a, sm_90a, 9.0a and 90 are the same one."""
    return [_parse(word) for word in text.replace(" ", ",").split(",") if word]


def _parse(word: str) -> Arch:
    wanted = word.strip().lower().removeprefix("sm_").removeprefix("sm").replace(".", "")
    for arch in SUPPORTED:
        if wanted in (arch.name, arch.name.rstrip("a")):
            return arch
    raise BuildError(
        f"Architecture {word} is not supported; supported are "
        f"{', '.join(arch.name for arch in SUPPORTED)}."
    )
