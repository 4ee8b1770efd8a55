"""What can be wrong with an adapter: one sentence that names the adapter and the reason, fit for a client to read."""

import errno

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of errors that are no fault of an adapter, and that pass."""


class AdapterError(ValueError):
    """An adapter that cannot be used.

    Attributes:
        name: the alias it was declared under.
        reason: what is wrong, without paths.
    """

    def __init__(self, name: str, reason: str) -> None:
        # A reason may quote what a file has in it: control characters, and halves of characters that no text may have.
        reason = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in reason)
        super().__init__(f"Adapter {name!r} cannot be used: {reason}.")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders by pickle, which by default calls the class with the finished sentence.
        return AdapterError, (self.name, self.reason)


class AdapterUnavailableError(AdapterError):
    """An adapter whose files cannot be had now, and may be soon: nothing is wrong with it."""

    def __reduce__(self) -> tuple[object, ...]:
        return AdapterUnavailableError, (self.name, self.reason)
