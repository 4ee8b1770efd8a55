"""The program `antiphon`: runs `app.cli.main`, and ends quietly if Ctrl-C comes before that handles it.

Its imports take a tenth of a second, in which Python would print a traceback. What the encoding of stdout lacks is
printed as "?".
"""

from __future__ import annotations

import io
import sys

EXIT_INTERRUPTED = 130


def main() -> int:
    """Run one command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        from app.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
