"""Adapter errors: each message is one sentence with the adapter's name and the reason, fit to show to a client."""

import errno

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
SERVER_TROUBLES = (*FULL_DISK, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
"""errno values of failures that are this machine's, not the adapter's, and that may pass."""


class AdapterError(ValueError):
    """An adapter that cannot be used.

    Attributes:
        name: the alias it was declared under.
        reason: what is wrong, without paths.
    """

    def __init__(self, name: str, reason: str) -> None:
        # A reason may quote file content, which may hold control characters and lone surrogates.
        reason = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in reason)
        super().__init__(f"Adapter {name!r} cannot be used: {reason}.")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled between processes, and by default pickle calls the class with the finished message.
        return type(self), (self.name, self.reason)


class AdapterUnavailableError(AdapterError):
    """An adapter whose files are temporarily unavailable; the adapter itself is not at fault."""


class AdapterGoneError(AdapterError):
    """An adapter that was unloaded while it was read; if it is wanted again, it is read again."""


class NoBaseTensorError(LookupError):
    """A tensor of the base that an adapter depends on cannot be read by the module's name, which is the argument."""
