"""Streams that tests follow to their ends, whatever happens to the server meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from tests.e2e.server import Server

BASE = "stdlib-chat"
NUM_STREAMS = 8
NUM_TOKENS = 300
LONG = "The documentation of the standard library. " * 98
"""Longer than what gateways tokenize themselves."""


@dataclass
class Streamed:
    """One stream as its client saw it."""

    text: str = ""
    num_events: int = 0
    is_done: bool = False
    error: Exception | None = None
    began: threading.Event = field(default_factory=threading.Event)


def options_of(number: int) -> dict[str, Any]:
    """Half of the streams are greedy, half drawn from a seed; no two ask the same."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    return drawn | {
        "model": BASE,
        "max_tokens": NUM_TOKENS,
        "messages": [{"role": "user", "content": f"What does os.path.join do, and what is {number}?"}],
        "extra_body": {"ignore_eos": True},
    }


def follow(server: Server, number: int, seen: Streamed, num_before: int = 5) -> Streamed:
    """Read a stream to its end; `seen.began` is set once some events have come."""
    try:
        with server.client() as client:
            for chunk in client.chat.completions.create(stream=True, **options_of(number)):
                seen.num_events += 1
                if chunk.choices:
                    seen.text += chunk.choices[0].delta.content or ""
                    seen.is_done = seen.is_done or chunk.choices[0].finish_reason is not None
                if seen.num_events >= num_before:
                    seen.began.set()
    except (openai.APIError, httpx.HTTPError) as error:
        seen.error = error
    finally:
        seen.began.set()
    return seen


def undisturbed(server: Server) -> list[str]:
    """What each stream says when nothing dies, each alone."""
    answers = [follow(server, number, Streamed()) for number in range(NUM_STREAMS)]
    assert all(answer.is_done and answer.error is None for answer in answers)
    return [answer.text for answer in answers]


def while_streaming(server: Server, strike: Callable[[], None], *, patience_s: float) -> list[Streamed]:
    """Start streams, strike when all of them are under way, and return how they ended."""
    streams = [Streamed() for _ in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        ends = [pool.submit(follow, server, number, seen) for number, seen in enumerate(streams)]
        for seen in streams:
            assert seen.began.wait(patience_s)
        strike()
        return [end.result(patience_s) for end in ends]


def is_idle(server: Server) -> bool:
    try:
        return server.metric("vllm:num_requests_running") == 0 and server.metric("vllm:kv_cache_usage_perc") == 0
    except httpx.HTTPError:
        return False


def has_replicas(server: Server, count: int) -> bool:
    """Whether so many replicas of the model tell their numbers."""
    try:
        with server.http() as http:
            lines = http.get("/metrics").text.splitlines()
    except httpx.HTTPError:
        return False
    return sum(line.startswith("vllm:num_requests_running{") for line in lines) == count


def prompts_seen(server: Server) -> list[float]:
    """Prompt tokens that each replica has taken so far."""
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total{")]
