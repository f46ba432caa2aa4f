"""The one exception of the driver, and the words for a full disk."""

import errno


class BuildError(Exception):
    """A failure the user can act on, worded as one sentence."""


def disk_full(error: OSError) -> bool:
    """True when `error` says that a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
