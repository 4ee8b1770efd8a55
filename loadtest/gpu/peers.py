"""What others do on the same device with the same shape: transformers' compiled decoding over a static cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from loadtest.geometries import CONFIG_BY_NAME

NUM_TOKENS, NUM_RUNS = 64, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigure:
    """Milliseconds of a decode step of one batch, the prompt's time taken off."""

    name: str
    step_ms: float


def decode_ms(model: str, batch: int, context: int, tell: Callable[[PeerFigure], None], **options: Any) -> None:
    """Time greedy decoding by transformers, first as it is and then compiled; `options` are of its `generate`.

    What is told first is there even if a compiler takes longer than there is time.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = dict(CONFIG_BY_NAME[model])
    config = AutoConfig.for_model(whole.pop("model_type"), **whole)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device):
        decoder = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(300, config.vocab_size, (batch, context), device=device)
    for name, chosen in (("as it is", {}), ("compiled, static cache", {"cache_implementation": "static"})):
        all_s = min(_seconds(decoder, prompt, NUM_TOKENS, chosen | options) for _ in range(NUM_RUNS))
        one_s = min(_seconds(decoder, prompt, 1, chosen | options) for _ in range(NUM_RUNS))
        step_ms = (all_s - one_s) / (NUM_TOKENS - 1) * 1000
        tell(
            PeerFigure(name=f"transformers, {name}: {model} decode, batch {batch}, context {context}", step_ms=step_ms)
        )


@torch.inference_mode()
def _seconds(decoder: Any, prompt: torch.Tensor, num_tokens: int, options: dict[str, Any]) -> float:
    started_s = time.perf_counter()
    decoder.generate(prompt, min_new_tokens=num_tokens, max_new_tokens=num_tokens, do_sample=False, **options)
    if prompt.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s
