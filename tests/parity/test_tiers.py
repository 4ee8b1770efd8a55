"""Random traffic over a disk that is late, loses blocks and outlives engines: of each token the same is told as of one
alone. A block that is somebody else's shows in a log-probability long before it changes a token.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine.build import build_engine
from engine.cache.prefix_index import BlockName
from engine.engine import Engine
from engine.errors import OverloadError
from engine.request import FinishReason, Request, RequestId
from engine.scheduling.step_costs import StepCosts
from engine.tiers.disk_slots import DiskSlots
from engine.tiers.mover import CacheBytes
from tests.parity.conftest import VOCAB, Checkpoint, emissions_of, greedy, make_engine, run_engine
from tests.parity.gpu_parts import Replays, config_of

PATIENCE_S = (10.0, 0.0, 10.0, 0.0)
"""Of one engine after the other, with a fetch that somebody waits for."""
NUM_REQUESTS = 36
"""Of each of them."""
LOST = 0.05
"""Of the blocks that are read."""
TOLERANCE = 1e-3

Told = list[tuple[int, float]]
"""Tokens and their log-probabilities."""


class LateThread:
    """In the place of an executor: what it was given is done, in its order, when it is told to go on."""

    def __init__(self, threads: list[LateThread]) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        threads.append(self)

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        self._jobs.append(lambda: job(*args))

    def go_on(self) -> None:
        if self._jobs:
            self._jobs.popleft()()

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        self._jobs.clear()


class Traffic:
    """What is asked of one engine after the other."""

    def __init__(self, seed: int, alone: Engine) -> None:
        self._random = Random(seed)
        self._alone = alone
        self._told_alone: dict[tuple[int, ...], Told] = {}
        self._stems = [self._tokens(90) for _ in range(4)]
        self._count = 0

    def serve(self, engine: Engine, threads: list[LateThread]) -> None:
        """Ask for so much, and compare what comes."""
        requests: dict[RequestId, Request] = {}
        told: dict[RequestId, Told] = {}
        ended: set[RequestId] = set()
        num_left = NUM_REQUESTS
        while num_left or len(ended) < len(requests):
            if num_left and self._random.random() < 0.5:
                num_left -= 1
                request = self._request()
                try:
                    engine.add(request)
                except OverloadError:
                    continue
                requests[request.request_id], told[request.request_id] = request, []
                if self._random.random() < 0.2:
                    engine.cancel(self._random.choice([*requests]))
            for thread in threads:
                if self._random.random() < 0.4:
                    thread.go_on()
            for emission in engine.step():
                assert emission.finish_reason is not FinishReason.FAILED, emission.error
                numbers = [of_token.logprob for of_token in emission.logprobs]
                told[emission.request_id] += zip(emission.token_ids, numbers, strict=True)
                if emission.finish_reason is not None:
                    ended.add(emission.request_id)
        for request_id, found in told.items():
            wanted = self._alone_of(requests[request_id])[: len(found)]
            assert [token_id for token_id, _ in found] == [token_id for token_id, _ in wanted]
            assert [number for _, number in found] == pytest.approx([number for _, number in wanted], abs=TOLERANCE)

    def reads(self, read: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        """Return what reads as `read` does, mostly."""

        def read_or_lose(slots: DiskSlots, slot: int, name: BlockName) -> torch.Tensor | None:
            return None if self._random.random() < LOST else read(slots, slot, name)

        return read_or_lose

    def _request(self) -> Request:
        self._count += 1
        begin = self._random.choice(self._stems)[: self._random.randint(0, 90)]
        prompt = begin + self._tokens(self._random.choice([0, 1, 20]))
        salt, tenant = self._random.choice(["", "", "x"]), self._random.choice("ab")
        request = greedy(f"r{self._count}", prompt or (1,), self._random.randint(1, 8), salt=salt, tenant=tenant)
        return replace(request, params=replace(request.params, num_logprobs=0))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(VOCAB), k=count))

    def _alone_of(self, request: Request) -> Told:
        prompt = request.prompt_ids
        if prompt not in self._told_alone:
            longest = replace(request, params=replace(request.params, max_tokens=8), salt="")
            (emissions,) = emissions_of(self._alone, [longest]).values()
            self._told_alone[prompt] = [
                (token_id, of_token.logprob)
                for emission in emissions
                for token_id, of_token in zip(emission.token_ids, emission.logprobs, strict=True)
            ]
        return self._told_alone[prompt]


@pytest.mark.parametrize("kernels", ["own", "torch"])
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_what_lay_on_a_disk_is_what_was_computed(
    checkpoint: Callable[[str], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    kernels: str,
) -> None:
    if kernels == "torch":
        monkeypatch.setattr("kernels.native.load", lambda: None)
    threads: list[LateThread] = []
    model = checkpoint(name)
    alone = make_engine(model, max_num_seqs=1, enable_prefix_cache=False, num_speculative_tokens=0)
    traffic = Traffic(7, alone)
    # So small a model computes a prompt sooner than anything is fetched.
    monkeypatch.setattr(StepCosts, "saved_s", lambda *_: math.inf)
    monkeypatch.setattr("engine.scheduling.block_tables.SEEK_AGAIN_S", 0.0)
    monkeypatch.setattr("engine.tiers.mover.ThreadPoolExecutor", lambda *_: LateThread(threads))
    monkeypatch.setattr(DiskSlots, "read", traffic.reads(DiskSlots.read))
    num_fetched = 0
    for patience_s in PATIENCE_S:
        monkeypatch.setattr("engine.cache.tiers.MAX_PATIENCE_S", patience_s)
        threads.clear()
        engine = make_engine(
            model,
            max_model_len=128,
            max_num_seqs=3,
            max_batched_tokens=48,
            kv_cache_bytes=256 * model.token_bytes,
            kv_disk_bytes=1000 * model.token_bytes,
            kv_disk_folder=str(tmp_path),
        )
        traffic.serve(engine, threads)
        num_fetched += engine.snapshot().fetched_tokens
        engine.stop()
        engine.run(lambda _: None)
    assert num_fetched > 0


def test_what_a_gpu_gave_to_the_host_is_what_was_computed(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied beside the steps, both ways, while others are computed."""
    replays, model = Replays(monkeypatch), checkpoint("llama3")
    read = CacheBytes.read

    def read_optimistically(cache: CacheBytes, blocks: Sequence[int], after: torch.cuda.Event | None) -> torch.Tensor:
        with nullcontext() if replays.gpu is None else replays.gpu.order.optimistic():
            return read(cache, blocks, after)

    # A block that was given to another request meanwhile is not kept.
    monkeypatch.setattr(CacheBytes, "read", read_optimistically)
    monkeypatch.setattr(StepCosts, "saved_s", lambda *_: math.inf)
    monkeypatch.setattr("engine.scheduling.block_tables.SEEK_AGAIN_S", 0.0)
    config = replace(
        config_of(model.path),
        max_model_len=64,
        max_batched_tokens=64,
        kv_cache_bytes=144 * model.token_bytes,
        kv_host_bytes=1000 * model.token_bytes,
        max_lent_cache_share=0.0,
    )
    engine, prompts = build_engine(config), [tuple(range(start, start + 50)) for start in range(3, 7)]
    for turn in range(2):
        found = run_engine(engine, [greedy(f"{turn}-{i}", prompt, 3) for i, prompt in enumerate(prompts)])
        assert [*found.values()] == [model.generate(prompt, 3) for prompt in prompts]
    assert engine.snapshot().fetched_tokens > 0
    assert replays.are_there
    engine.stop()
    engine.run(lambda _: None)
