"""What the parts of a server warned of while they started, from their logs, which nobody reads who sees it ready."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from deployments.config import GATEWAY

MAX_NOTES = 12
_LINE = re.compile(r"(?:WARNING|ERROR) \S+ \S+ (?P<part>\S+) \S+ -- (?P<text>.*)")


def start_notes(logs: Path) -> list[str]:
    """Return a line for each warning in the logs of replicas in a folder of Serve's, and where all of them are."""
    # A part is the application's name and the deployment's.
    found = dict.fromkeys(f"note: {part.partition('_')[2]}: {text}" for part, text in _warnings(logs))
    notes = list(found)[:MAX_NOTES]
    if len(found) > MAX_NOTES:
        notes.append(f"note: there are {len(found) - MAX_NOTES} more warnings")
    return [*notes, f"Logs: {logs}"]


def _warnings(logs: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(logs.glob("replica_*.log")):
        # Those of gateways are nearly all Serve's own, of parts that are not there yet.
        if f"_{GATEWAY}_" in path.name:
            continue
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                # The last line may be half written.
                with suppress(ValueError):
                    fields = json.loads(line)
                    if fields.get("levelname") in ("WARNING", "ERROR"):
                        yield str(fields.get("deployment", "")), str(fields.get("message", ""))
            elif match := _LINE.match(line):
                yield match["part"], match["text"]
