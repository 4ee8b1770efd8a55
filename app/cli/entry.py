"""The program `antiphon`: runs `app.cli.main`, and ends quietly if Ctrl-C comes before that handles it.

Its imports take a tenth of a second, in which Python would print a traceback. What the encoding of stdout lacks is
printed as "?". A full disk ends a command in one line, and a reader that has left, as `head` does, in none.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_READER = errno.EPIPE


def main() -> int:
    """Run one command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        from app.cli.main import main as run

        status = run()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in (*_NO_ROOM, _NO_READER):
            raise
        if error.errno != _NO_READER:
            print(f"error: cannot write {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        _drop_output()
        return EXIT_FAILED


def _drop_output() -> None:
    """Drop what is left in the buffer of stdout, which Python would fail to write at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
