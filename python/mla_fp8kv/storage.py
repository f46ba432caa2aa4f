"""Whether a compiled module can be stored in a directory; imports neither torch nor FlashInfer."""

import os
import tempfile
from pathlib import Path

MEGABYTES = 16  # objects and library of one module, for several architectures


def fault(directory: Path) -> str | None:
    """Why MEGABYTES cannot be written to `directory`, in the system's words; None if they can.

    Found by trying, in the nearest folder that exists: mode bits and free space do not tell of
    read-only mounts and quotas. Nothing is left behind.
    """
    while not os.path.exists(directory):
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, MEGABYTES << 20)
    except OSError as error:
        return error.strerror
    return None
