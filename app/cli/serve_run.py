"""`serve run` with an end that answers live to see: told to stop, the gateways finish what they have, then Serve ends.

Run as a program. What Serve does by itself is to end all gateways at once, and their streams in the middle of a word;
to call errors what belongs to every end; to call a configuration good that it has only read; and to start Ray's
dashboard, whether or not anybody looks at it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import scripts
from ray.serve.exceptions import RayServeException

from app.cli import preflight, serve_environment, worker_forks
from app.cli.config_file import read_config
from app.cli.server_process import COLOUR, REASON
from deployments.config import GATEWAY
from engine import machine

DRAIN_MARGIN_S = 5.0
"""Beyond the seconds of the answers, for the word to reach the gateways and their last ones to reach the clients."""
POLL_S = 0.1
STATUS_PERIOD_S = 1.0
LACKS_MEMORY = "of our processes: the memory limit of this container or service is too low for the configuration."

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

_logger = logging.getLogger(__name__)


async def drain(limit_s: float) -> None:
    """Let the gateways of all applications refuse what comes, and finish what they have within `limit_s`."""

    async def drain_application(name: str) -> None:
        gateways = serve.get_deployment_handle(GATEWAY, name)
        # A handle that has just been made knows no replicas, and asks none.
        while not await gateways.broadcast("drain", limit_s).results_async():
            await asyncio.sleep(POLL_S)

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
        # To ask for what runs would start it.
        return
    await drain(drain_s)
    # Ray tells on stdout, until this process ends, what it thinks of a controller that is killed when its work is done.
    sys.stdout = io.StringIO()
    # On the loop that the handles were made on, and while it runs: they complain of every other end.
    await serve.shutdown_async()


def _end(drain_s: float, number: int, frame: FrameType | None) -> None:
    # Once more, and nobody is waited for.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A gateway that is late with an answer, as one is that ends its streams, is nothing to be told of.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    asyncio.new_event_loop().run_until_complete(_shut_down(drain_s))
    # Until this process has left a cluster that stays, handles call it an error that their loop has ended.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    sys.exit()


def wait_until_deployed() -> str | None:
    """Wait until all applications run; returns why one of them never will, None where they do.

    Ray starts anew whatever dies, and the kernel kills it anew where memory is too small: that is told.
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
        # The controller has just died; Ray starts it anew.
        return {}
    return found


def _reason(application: ApplicationStatusOverview) -> str:
    messages = [application.message, *(part.message for part in application.deployments.values())]
    text = "\n".join(message.strip() for message in messages if message) or "Serve gave no reason"
    return COLOUR.sub("", text)


def end_without(parent: int) -> None:
    """End this process as a signal would once the one that started it is gone: nobody else would ever end it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(STATUS_PERIOD_S)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _start_ray(address: str, *, has_dashboard: bool) -> None:
    connect = partial(ray.init, address, namespace="serve", include_dashboard=has_dashboard)
    if not worker_forks.are_possible(address):
        connect()
        return
    with worker_forks.forked_workers(serve_environment.of_this_process):
        connect(_system_config=worker_forks.SYSTEM_CONFIG)


def _lacking_gpus(config: str) -> str | None:
    """Return that a cluster of this machine alone, which never grows, has too few GPUs; None where it has enough."""
    wanted = preflight.wanted_gpus(read_config(config))
    there = ray.cluster_resources().get("GPU", 0.0) if wanted else 0.0
    if wanted <= there:
        return None
    return f"models request {wanted:g} GPU(s), but Ray found {there:g} on this machine; see engine.device and num_gpus"


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
    end_without(os.getppid())
    _start_ray(asked.address, has_dashboard=asked.dashboard)
    failure = _lacking_gpus(asked.config) if asked.address == "local" else None
    if failure is not None:
        sys.exit(REASON + failure)
    try:
        scripts.cli(["run", "--non-blocking", asked.config], prog_name="serve", standalone_mode=False)
        failure = wait_until_deployed()
        while failure is None:
            signal.pause()
    except KeyboardInterrupt:
        sys.stdout.write("Shutting down...\n")
    serve.shutdown()
    sys.exit(None if failure is None else REASON + failure)


if __name__ == "__main__":
    main()
