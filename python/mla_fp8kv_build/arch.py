"""GPU architectures: their names, and what a block can have of their shared memory."""

from dataclasses import dataclass

from mla_fp8kv_build.errors import BuildError


@dataclass(frozen=True)
class Arch:
    """A compile target: what follows sm_ in its name, and the bytes a block can opt in to."""

    name: str
    smem_limit: int

    @property
    def flashinfer(self) -> str:
        """The same in FlashInfer's FLASHINFER_CUDA_ARCH_LIST, such as 9.0a."""
        digits = self.name.rstrip("a")
        return f"{digits[:-1]}.{digits[-1]}{self.name[len(digits) :]}"

    @property
    def hardware_cvt(self) -> bool:
        """True where the FP8 to FP16 conversion is an instruction."""
        return int(self.name.rstrip("a")) >= 89


SUPPORTED = (
    Arch("80", 166_912),
    Arch("86", 101_376),
    Arch("89", 101_376),
    Arch("90a", 232_448),
    Arch("100a", 232_448),
    Arch("103a", 232_448),
    Arch("120a", 101_376),
    Arch("121a", 101_376),
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
