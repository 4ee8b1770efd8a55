"""A process whose actor was given up ends; one that cannot ask stays."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import ray
from ray.exceptions import GetTimeoutError, RaySystemError

from deployments import actor_process
from deployments.actor_process import GC_THRESHOLD, MAX_MISSES, begin_actor, end_when_forgotten, settle


def looks_before_the_end(*known: bool) -> int:
    answers = iter(known)
    ends: list[int] = []
    end_when_forgotten(lambda: next(answers), end=ends.append, sleep=lambda _: None)
    assert ends == [1]
    return len(known) - len(list(answers))


def test_a_process_ends_once_its_actor_is_unknown_several_times_in_a_row() -> None:
    assert looks_before_the_end(True, False, False, True, *[False] * MAX_MISSES, True) == 4 + MAX_MISSES


def test_one_that_was_never_known_is_not_forgotten() -> None:
    """Whatever keeps the cluster from finding it: ended over and over, it would never serve."""
    never = [False] * MAX_MISSES * 2
    assert looks_before_the_end(*never, True, *[False] * MAX_MISSES) == len(never) + 1 + MAX_MISSES


def raises(error: Exception) -> Callable[[str, str], object]:
    def get_actor(name: str, namespace: str) -> object:
        raise error

    return get_actor


@pytest.mark.parametrize(
    ("get_actor", "is_known"),
    [
        (lambda name, namespace: object(), True),
        (raises(ValueError("Failed to look up actor with name")), False),
        (raises(GetTimeoutError("the head is away")), True),
        (raises(RaySystemError("the connection broke")), True),
    ],
)
def test_only_who_is_told_so_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, get_actor: Callable[[str, str], object], is_known: bool
) -> None:
    monkeypatch.setattr(ray, "get_actor", get_actor)
    assert actor_process._is_known("SERVE_REPLICA::a#b#c") is is_known


def test_outside_of_an_actor_nothing_is_watched() -> None:
    begin_actor()
    assert "watch" not in [thread.name for thread in threading.enumerate()]


def test_what_an_actor_has_loaded_is_exempt_from_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    settle()
    assert gc.get_freeze_count() == before
    monkeypatch.setattr(actor_process, "_actor_name", lambda: "SERVE_REPLICA::a#b#c")
    try:
        settle()
        assert gc.get_freeze_count() > before
        assert gc.get_threshold()[0] == GC_THRESHOLD
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
