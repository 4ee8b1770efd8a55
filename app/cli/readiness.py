"""Waits until a server that was started is ready, tells how to use it, and waits until it ends."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from typing import Any

import httpx

from app.cli.config_file import our_applications
from app.cli.server_process import ServerProcess, tell

_POLL_S = 0.25
_MAX_ANSWER_CHARS = 600


def watch(server: ServerProcess, tree: Mapping[str, Any], url: str, timeout_s: float) -> str:
    """Wait until the applications are ready, report it, wait until the child ends, and return what went wrong."""
    started_s = time.monotonic()
    waiting = [f"{url}{prefix}/health" for prefix in _prefixes(tree)]
    while waiting:
        if (failure := server.failure()) is not None:
            return failure
        if (state := unready_state(waiting[0])) is None:
            waiting.pop(0)
            continue
        if time.monotonic() - started_s > timeout_s:
            return f"not ready after {timeout_s:g} s: {waiting[0]} did not return 200, but {state}"
        time.sleep(_POLL_S)
    tell(_ready_text(tree, url, time.monotonic() - started_s))
    while not server.has_ended():
        time.sleep(_POLL_S)
    return server.failure() or "`serve run` ended"


def _ready_text(tree: Mapping[str, Any], url: str, elapsed_s: float) -> str:
    lines = [f"\nReady after {elapsed_s:.0f} s at {url}"]
    for application in our_applications(tree):
        base = url + _prefix(application)
        models = [model["name"] for model in application["args"]["models"]]
        body = {
            "model": models[0],
            "temperature": 0,
            "stream": True,
            "messages": [{"role": "user", "content": "What does os.getcwd do?"}],
        }
        key = " -H 'authorization: Bearer KEY'" if application["args"].get("tenants") else ""
        lines += [
            f"Models: {', '.join(models)} (with their adapters: curl {base}/v1/models). Try:\n",
            f"  curl -N {base}/v1/chat/completions -H 'content-type: application/json'{key} \\",
            f"    -d {shlex.quote(json.dumps(body))}",
        ]
    return "\n".join([*lines, "\nPress Ctrl-C to stop.\n"])


def _prefixes(tree: Mapping[str, Any]) -> list[str]:
    ours = our_applications(tree) or tree["applications"]
    return [_prefix(application) for application in ours]


def _prefix(application: Mapping[str, Any]) -> str:
    return str(application.get("route_prefix") or "/").rstrip("/")


def unready_state(health_url: str) -> str | None:
    """Return what an unready server answers; None if it is ready."""
    try:
        # Without TLS there is nothing to verify, and reading the certificates for it would take 20 ms each time.
        answer = httpx.get(health_url, timeout=5, trust_env=False, verify=False)
    except httpx.HTTPError as error:
        return f"no answer ({error})"
    if answer.status_code == httpx.codes.OK:
        return None
    return f"status {answer.status_code}: {' '.join(answer.text[:_MAX_ANSWER_CHARS].split())}"
