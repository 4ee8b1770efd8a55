"""Adapters that are not loaded, beside others that never stop being used: the scheduler with a real pool on a CPU,
where what is loaded and what is pinned share one memory. Loads take steps.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.identity import AdapterDigest, AdapterRef
from adapters.weights import AdapterWeights
from engine.adapter_pool import AdapterPool
from engine.scheduling.pins import MAX_SKIPS
from tests.adapters.stepwise import Later, Sized
from tests.engine.scripted import Harness, a_config, a_request

STEP_S = 0.1
NUM_LOAD_STEPS = 3
NUM_STEPS_BEFORE = 40
NUM_STEPS = NUM_STEPS_BEFORE + 3 * MAX_SKIPS


class SizedLoader:
    """An `AdapterLoader` for adapters whose path is their size."""

    def load(self, ref: AdapterRef) -> AdapterWeights:
        return Sized(int(ref.path))


class SteppedPool(AdapterPool):
    """A pool whose time passes by steps, and that counts pins as `Harness` wants it."""

    def __init__(self, sizes: Sequence[int], max_bytes: int) -> None:
        self.now_s = 0.0
        self.pins: Counter[AdapterDigest] = Counter()
        self.runs: list[range] = []
        self.digests = [AdapterDigest(hashlib.sha256(bytes([index])).hexdigest()) for index in range(len(sizes))]
        refs = [
            AdapterRef(name=f"a{index}", path=str(size), digest=digest)
            for index, (size, digest) in enumerate(zip(sizes, self.digests, strict=True))
        ]
        config = a_config(
            max_device_adapters=None, max_host_adapter_bytes=max_bytes, max_device_adapter_bytes=max(max_bytes, *sizes)
        )
        super().__init__(refs, SizedLoader(), config, torch.device("cpu"), clock=lambda: self.now_s)  # type: ignore[arg-type]
        self._host._threads = self._loads = Later()
        self._num_load_steps = 0

    def tick(self) -> None:
        self.now_s += STEP_S
        self._num_load_steps += bool(self._loads.jobs)
        if self._num_load_steps == NUM_LOAD_STEPS:
            self._num_load_steps = 0
            self._loads.jobs.pop(0)()

    def try_pin(self, digest: AdapterDigest) -> bool:
        is_pinned = super().try_pin(digest)
        self.pins[digest] += is_pinned
        return is_pinned

    def unpin(self, digest: AdapterDigest) -> None:
        super().unpin(digest)
        self.pins[digest] -= 1


class Crowd(NamedTuple):
    """Sizes of the adapters that are always in use, of one that is asked for once, and of strangers that come later.

    `stranger_every`: steps from one stranger to the next.
    """

    hot: list[int]
    lone: int
    strangers: list[int]
    stranger_every: int
    max_bytes: int


@st.composite
def crowds(draw: st.DrawFn) -> Crowd:
    sizes = st.integers(5, 15)
    hot = draw(st.lists(sizes, min_size=1, max_size=4))
    strangers = draw(st.just([]) | st.lists(sizes, min_size=200, max_size=200))
    # From too little for one of them to enough for all of the hot ones, but not for one more of any size.
    max_bytes = draw(st.integers(5, sum(hot) + 15))
    return Crowd(hot, draw(sizes), strangers, draw(st.integers(1, 5)), max_bytes)


@given(crowds())
@example(Crowd(hot=[10], lone=10, strangers=[], stranger_every=1, max_bytes=15))
@example(Crowd(hot=[10], lone=10, strangers=[10] * 200, stranger_every=1, max_bytes=15))
@example(Crowd(hot=[10, 10, 10], lone=10, strangers=[10] * 200, stranger_every=1, max_bytes=39))
@settings(max_examples=30, deadline=None)
def test_one_that_is_not_loaded_gets_its_turn_whatever_is_always_in_use_and_whoever_comes_later(crowd: Crowd) -> None:
    """Where pinned adapters left no memory for it, its load never began: it waited for as long as they were in use."""
    pool = SteppedPool([*crowd.hot, crowd.lone, *crowd.strangers], crowd.max_bytes)
    num_hot = len(crowd.hot)
    lone, *strangers = pool.digests[num_hot:]
    harness = Harness(a_config(max_num_seqs=3 * num_hot + 2, num_blocks=400), pool, clock=lambda: pool.now_s)  # type: ignore[arg-type]
    # Two requests of each, which take turns to end.
    hot = [(digest, f"{digest}{place}", 6 + 3 * place) for digest in pool.digests[:num_hot] for place in range(2)]
    for digest, name, max_tokens in hot:
        harness.add(a_request(name, adapter=digest, max_tokens=max_tokens))
    for step in range(NUM_STEPS):
        if step == NUM_STEPS_BEFORE:
            harness.add(a_request("lone", adapter=lone, max_tokens=1))
        if step > NUM_STEPS_BEFORE and step % crowd.stranger_every == 0 and strangers:
            harness.add(a_request(f"stranger{len(strangers)}", adapter=strangers.pop(), max_tokens=2))
        harness.step()
        for place, (digest, name, _) in enumerate(hot):
            if harness.reason(name) is not None:
                hot[place] = digest, f"{name}+", 6
                harness.add(a_request(f"{name}+", adapter=digest, max_tokens=6))
        if harness.emissions.get("lone"):
            break
    assert harness.tokens("lone"), "it starves"
    pool.close()
