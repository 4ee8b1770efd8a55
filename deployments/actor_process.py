"""Startup of every deployment's actor process, its garbage collection, and its end where Ray does not end it.

Ray asks the process of an actor that it has given up to exit and, if it cannot connect, counts it as gone all the same.
So a process that was frozen for a while, as on a paused machine, resumes as an orphan: no request reaches it, another
one has replaced it, and it would hold its memory, on a GPU almost all there is, until somebody noticed.
"""

from __future__ import annotations

import gc
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
GC_THRESHOLD = 10_000
"""Objects created and not deleted between two collections of the youngest; Python's own default is 700 (3.11)."""

_logger = logging.getLogger(__name__)


def begin_actor() -> None:
    """Join Serve's log, and start watching whether the cluster still knows this process's actor."""
    join_serve_log()
    if name := _actor_name():
        threading.Thread(target=end_when_forgotten, args=(lambda: _is_known(name),), name="watch", daemon=True).start()


def settle() -> None:
    """Exempt from garbage collection what has been loaded, and collect the rest less often. Call it once all is loaded.

    A full collection stops every thread while it visits all objects: with those of a few hundred modules and of a
    thousand open requests for up to 0.4 s, in all two fifths of an overloaded gateway's CPU time.
    """
    if _actor_name():
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


def end_when_forgotten(
    is_known: Callable[[], bool],
    *,
    end: Callable[[int], object] = os._exit,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """End the process once the cluster has known its actor and then misses it `MAX_MISSES` times in a row."""
    while not is_known():
        sleep(PERIOD_S)
    misses = 0
    while misses < MAX_MISSES:
        sleep(PERIOD_S)
        misses = 0 if is_known() else misses + 1
    _logger.error("This replica is no longer known to the cluster; its process exits.")
    end(1)


def end_process() -> None:
    """End this process at once, as if it had been killed; Serve replaces it, and streams go on elsewhere."""
    logging.shutdown()
    os._exit(1)


def _actor_name() -> str | None:
    """Return the name of the actor that runs in this process; None outside of one."""
    return (ray.get_runtime_context().get_actor_name() or None) if ray.is_initialized() else None


def _is_known(name: str) -> bool:
    try:
        # A job not started by `serve run`, such as one of the dashboard's API, has another namespace.
        ray.get_actor(name, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    except RayError:
        # The head node does not answer; replicas keep serving until it is back.
        return True
    return True
