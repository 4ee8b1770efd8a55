"""Benchmarks of transformers on the same device with the same shapes: plain, continuous batching, and compiled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from loadtest.geometries import CONFIG_BY_NAME
from loadtest.gpu.parts import Attempt

NUM_TOKENS, NUM_RUNS = 64, 3
BATCH = 64
"""Batch size of continuous batching; the others decode one sequence."""
COMPILED = {"cache_implementation": "static"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigure:
    """Milliseconds of a decode step of one batch, excluding prefill."""

    name: str
    step_ms: float


def decode_ms(model: str, context: int, attempt: Attempt = nullcontext, **options: Any) -> Iterator[PeerFigure]:
    """Time greedy decoding by transformers in each mode and yield its figure at once.

    `options` are passed to its `generate`. The compiled mode comes last: compilation may exceed the time limit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = dict(CONFIG_BY_NAME[model])
    config = AutoConfig.for_model(whole.pop("model_type"), **whole)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device):
        decoder = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompts = torch.randint(300, config.vocab_size, (BATCH, context), device=device)
    for name, batch, step_ms in (
        ("as it is", 1, partial(_alone_ms, decoder, prompts[:1], options)),
        ("continuous batching", BATCH, partial(_batched_ms, decoder, prompts.tolist())),
        ("compiled, static cache", 1, partial(_alone_ms, decoder, prompts[:1], options | COMPILED)),
    ):
        title = f"transformers, {name}: {model} decode, batch {batch}, context {context}"
        with attempt(title):
            yield PeerFigure(name=title, step_ms=step_ms())


def _alone_ms(decoder: Any, prompt: torch.Tensor, options: dict[str, Any]) -> float:
    all_s, one_s = (
        min(_seconds(decoder, prompt, num_tokens, options) for _ in range(NUM_RUNS)) for num_tokens in (NUM_TOKENS, 1)
    )
    return (all_s - one_s) / (NUM_TOKENS - 1) * 1000


@torch.inference_mode()
def _seconds(decoder: Any, prompt: torch.Tensor, num_tokens: int, options: dict[str, Any]) -> float:
    started_s = time.perf_counter()
    decoder.generate(prompt, min_new_tokens=num_tokens, max_new_tokens=num_tokens, do_sample=False, **options)
    if prompt.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def _batched_ms(decoder: Any, prompts: list[list[int]]) -> float:
    """Return the mean time of the steps in which all sequences decode: from the last start to the first end."""
    from transformers import GenerationConfig

    # Token -1 does not exist, so no token ends an answer.
    wanted = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # The first run is a warm-up.
    for _ in range(2):
        answers = decoder.generate_batch(inputs=prompts, generation_config=wanted, record_timestamps=True).values()
    times_s = [answer.timestamps for answer in answers]
    if len(times_s) < len(prompts) or any(len(times) < NUM_TOKENS for times in times_s):
        raise RuntimeError(f"not all were answered: {next((a.error for a in answers if a.error), 'no reason given')}")
    last = max(times_s, key=lambda times: times[0])
    full_s = [at_s for at_s in last if at_s <= min(times[-1] for times in times_s)]
    return float(full_s[-1] - full_s[0]) / (len(full_s) - 1) * 1000
