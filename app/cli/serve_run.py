"""`serve run` with a graceful shutdown: gateways finish their running answers before Serve ends.

Run as a program. Plain `serve run` stops all gateways at once and cuts their streams in the middle of a word, logs
errors on every normal shutdown, reports success as soon as it has read the configuration, and always starts Ray's
dashboard.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import scripts
from ray.serve.exceptions import RayServeException

from app.cli import preflight, serve_environment, worker_forks
from app.cli.config_file import read_config
from app.cli.server_process import COLOUR, REASON, end_without, kill_session
from deployments.config import GATEWAY
from engine import machine

DRAIN_MARGIN_S = 5.0
"""Added to the seconds for answers, so that the call reaches the gateways and the last tokens reach the clients."""
POLL_S = 0.1
STATUS_PERIOD_S = 1.0
LACKS_MEMORY = "of our processes: the memory limit of this container or service is too low for the configuration."
NOT_IN_TIME = "timed out during startup"
"""In the plain `Exception` that Ray raises if its own processes are not up in time, for some of them 15 seconds."""
TOO_BUSY = (
    "Ray's own processes did not start in time, twice. This machine may be too busy, or have too little CPU or memory; "
    "raylet.out and dashboard_agent.log tell more, in"
)
JOINING = "A cluster must be running there (`ray start --head`), with this machine's Ray token: see docs/operations.md"

MAX_NOTES = 12
_LINE = re.compile(r"(?:WARNING|ERROR) \S+ \S+ (?P<part>\S+) \S+ -- (?P<text>.*)")

if TYPE_CHECKING:
    from ray.client_builder import BaseContext
    from ray.serve.schema import ApplicationStatusOverview

_logger = logging.getLogger(__name__)


async def drain(limit_s: float) -> None:
    """Make the gateways of all applications refuse new requests and finish running ones within `limit_s`."""

    async def drain_application(name: str) -> None:
        gateways = serve.get_deployment_handle(GATEWAY, name)
        # A new handle does not know any replicas yet, and its broadcast reaches none.
        # One that dies meanwhile ends nobody else's answers.
        while not (ends := await gateways.broadcast("drain", limit_s).results_async(return_exceptions=True)):
            await asyncio.sleep(POLL_S)
        for error in ends:
            if isinstance(error, BaseException):
                _logger.warning("a gateway was not waited for: %s", error)

    try:
        async with asyncio.timeout(limit_s + DRAIN_MARGIN_S):
            names = [
                name
                for name, application in serve.status().applications.items()
                if GATEWAY in application.deployments and application.deployments[GATEWAY].replica_states.get("RUNNING")
            ]
            await asyncio.gather(*map(drain_application, names))
    except (RayError, RayServeException, TimeoutError) as error:
        _logger.warning("shutting down without waiting for running answers: %s", error)


async def _shut_down(drain_s: float) -> None:
    if not ray.is_initialized():
        # Asking for Serve's status would start Ray.
        return
    await drain(drain_s)
    # Until this process ends, Ray reports on stdout that the controller was killed, which is normal once it is done.
    sys.stdout = io.StringIO()
    # On the event loop on which the handles were created, while it still runs; otherwise they log errors.
    await serve.shutdown_async()


def _end(drain_s: float, number: int, frame: FrameType | None) -> None:
    # A second SIGINT stops the waiting.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Serve's warnings about gateways that respond late are noise: they are ending their streams.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    asyncio.new_event_loop().run_until_complete(_shut_down(drain_s))
    # Until this process leaves a cluster that goes on, handles log an error because their event loop has ended.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    sys.exit()


def wait_until_deployed() -> str | None:
    """Wait until all applications run and return None, or return why one of them failed to deploy.

    Reports processes that the kernel kills for lack of memory: Ray restarts them, only for them to be killed again.
    """
    num_killed = machine.num_killed()
    while True:
        num_before, num_killed = num_killed, machine.num_killed()
        if num_killed > num_before:
            sys.stdout.write(f"\nThe kernel has killed {num_killed - num_before} {LACKS_MEMORY}\n")
        applications = _applications()
        for name, application in applications.items():
            if application.status == "DEPLOY_FAILED":
                reason = _reason(application)
                sys.stdout.write(f"\n{reason}\n")
                return f"application '{name}' failed to deploy: {reason.splitlines()[-1]}"
        if applications and all(application.status == "RUNNING" for application in applications.values()):
            return None
        time.sleep(STATUS_PERIOD_S)


def _applications() -> Mapping[str, ApplicationStatusOverview]:
    try:
        found: Mapping[str, ApplicationStatusOverview] = serve.status().applications
    except (RayError, RayServeException):
        # The controller has just died; Ray restarts it.
        return {}
    return found


def _reason(application: ApplicationStatusOverview) -> str:
    messages = [application.message, *(part.message for part in application.deployments.values())]
    text = "\n".join(message.strip() for message in messages if message) or "Serve gave no reason"
    return COLOUR.sub("", text)


def _start_ray(address: str, *, has_dashboard: bool) -> Path:
    """Start or join a cluster; return the folder of its logs on this machine.

    Exits with the reason if there is no cluster to join or it does not accept this machine's token; Ray does not tell
    the two apart. Ray may be too slow for its own time limits on a busy machine: one that it starts gets a second try,
    which finds its files in memory.
    """
    connect = partial(ray.init, address, namespace="serve", include_dashboard=has_dashboard)
    if worker_forks.are_possible(address):
        connect = partial(_with_forks, partial(connect, _system_config=worker_forks.SYSTEM_CONFIG))
    try:
        context = connect() if address != "local" else _in_time(connect)
    except ConnectionError as error:
        if address == "local":
            raise
        sys.exit(f"{REASON}{str(error).rstrip('.')}. {JOINING}")
    return Path(context.address_info["session_dir"]) / "logs"


def _with_forks(connect: Callable[[], BaseContext]) -> BaseContext:
    with worker_forks.forked_workers(serve_environment.of_this_process):
        return connect()


def _in_time(connect: Callable[[], BaseContext]) -> BaseContext:
    """Start a cluster, with a second try if its processes were too slow; exit with the reason if they are again."""
    for is_last in (False, True):
        try:
            return connect()
        except Exception as error:
            if NOT_IN_TIME not in str(error):
                raise
            if is_last:
                from ray._common.utils import get_default_ray_temp_dir

                logs = Path(get_default_ray_temp_dir(), "session_latest", "logs")
                sys.exit(f"{REASON}{TOO_BUSY} {logs}")
        sys.stdout.write("Ray's own processes did not start in time; trying once more.\n")
        if os.getsid(0) == os.getpid():
            # Ray forgets the processes of a failed start, which would go on beside the others for ever.
            kill_session(os.getpid(), but=(os.getpid(),))
    raise AssertionError


def _lacking(config: str) -> str | None:
    """Return an error if a cluster of this machine alone, which never grows, has too few GPUs or CPUs, else None."""
    tree, found = read_config(config), ray.cluster_resources()
    wanted, there = preflight.wanted_gpus(tree), found.get("GPU", 0.0)
    if wanted <= there:
        return preflight.too_many_cpus(tree, found.get("CPU", 0.0))
    return f"models request {wanted:g} GPU(s), but Ray found {there:g} on this machine; see engine.device and num_gpus"


def start_notes(logs: Path) -> list[str]:
    """Return a line for each warning in the logs of replicas in a folder of Serve's, and where all of them are.

    Nobody reads them who sees the server ready.
    """
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


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--address", required=True, help="Ray cluster; 'local' starts one")
    parser.add_argument(
        "--drain-s", type=float, required=True, help="seconds that running answers have to finish on shutdown"
    )
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard with a new cluster")
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, partial(_end, asked.drain_s))
    # Blocked by `ServerProcess` until now. Before Ray starts: its processes inherit the mask.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_without(os.getppid(), partial(os.kill, os.getpid(), signal.SIGINT))
    logs = _start_ray(asked.address, has_dashboard=asked.dashboard)
    failure = _lacking(asked.config) if asked.address == "local" else None
    if failure is not None:
        sys.exit(REASON + failure)
    try:
        scripts.cli(["run", "--non-blocking", asked.config], prog_name="serve", standalone_mode=False)
        failure = wait_until_deployed()
        if failure is None:
            sys.stdout.write("\n".join(["", *start_notes(logs / "serve"), ""]))
        while failure is None:
            signal.pause()
    except KeyboardInterrupt:
        sys.stdout.write("Shutting down...\n")
    serve.shutdown()
    sys.exit(None if failure is None else REASON + failure)


if __name__ == "__main__":
    main()
