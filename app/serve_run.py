"""`serve run` with an end that answers live to see: told to stop, the gateways finish what they have, then Serve ends.

Run as a program, with the seconds that answers have and then the arguments of `serve run`. What Serve does by itself is
to end all gateways at once, and their streams in the middle of a word.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from functools import partial
from types import FrameType

from ray.serve import scripts

DRAIN_MARGIN_S = 5.0
"""Beyond the seconds of the answers, for the word to reach the gateways and their last ones to reach the clients."""
POLL_S = 0.1

_logger = logging.getLogger(__name__)


async def drain(limit_s: float) -> None:
    """Let the gateways of all applications refuse what comes, and finish what they have within `limit_s`."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from deployments.config import GATEWAY

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
        _logger.warning("the server ends without waiting for its answers: %s", error)


def _end(drain_s: float, number: int, frame: FrameType | None) -> None:
    # Once more, and nobody is waited for.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Not closed: Serve ends the handles that were made on it.
    asyncio.new_event_loop().run_until_complete(drain(drain_s))
    raise KeyboardInterrupt


def main() -> None:
    """Run the program."""
    drain_s, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, partial(_end, float(drain_s)))
    scripts.cli(["run", *arguments], prog_name="serve")


if __name__ == "__main__":
    main()
