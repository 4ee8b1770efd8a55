"""What the process of every deployment's actor does first, and what ends it where Ray does not.

Ray asks the process of an actor that it has given up to end, and where it cannot connect to it, counts it as gone all
the same. So a process that was frozen for a while, as a paused machine's are, thaws as nobody's: no request reaches it,
a new one has taken its place, and it would hold its memory, of a GPU mostly all there is, until somebody noticed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_NAMESPACE

from deployments.logs import join_serve_log

PERIOD_S, MAX_MISSES = 20.0, 3

_logger = logging.getLogger(__name__)


def begin_actor() -> None:
    """Join Serve's log, and begin to watch whether the cluster knows this process's actor."""
    join_serve_log()
    if ray.is_initialized() and (name := ray.get_runtime_context().get_actor_name()):
        threading.Thread(target=end_when_forgotten, args=(lambda: _is_known(name),), name="watch", daemon=True).start()


def end_when_forgotten(
    is_known: Callable[[], bool],
    *,
    end: Callable[[int], object] = os._exit,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """End the process once the cluster, which has known it, has not several times in a row."""
    while not is_known():
        sleep(PERIOD_S)
    misses = 0
    while misses < MAX_MISSES:
        sleep(PERIOD_S)
        misses = 0 if is_known() else misses + 1
    _logger.error("The cluster knows nothing of this replica any more: its process ends.")
    end(1)


def _is_known(name: str) -> bool:
    try:
        # A job that does not begin with `serve run`, as that of the dashboard's API, has another namespace of its own.
        ray.get_actor(name, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    except RayError:
        # Nobody answers: the head is away, and replicas serve on until it is back.
        return True
    return True
