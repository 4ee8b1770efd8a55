"""Engines on a GPU in bfloat16, the type of most checkpoints, by our kernels wherever there is one.

Tokens of random models are no measure here: many are as likely as the next but for what is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest
import torch

from engine.build import build_engine
from engine.gpu.streamed_linear import Way
from tests.parity.conftest import Checkpoint, emissions_of, greedy, random_prompts
from tests.parity.gpu_parts import Replays, config_of, join_few_rows

NUM_TOKENS = 5
BOTH = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """A GPU, on which a row or two take the kernels that do more at once, and more rows our tiles."""
    join_few_rows(monkeypatch, others=Way.TILES)
    return Replays(monkeypatch)


# What is particular to other families is compared in float32, token by token.
@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt-oss"])
def test_they_err_no_more_than_transformers(shallow: Callable[[str], Checkpoint], replays: Replays, name: str) -> None:
    """Both round at nearly every operation, in another order; of prompts in chunks and of recorded steps.

    At most tokens: where two experts are nearly as likely, either may choose the one that float32 does not.
    """
    family = shallow(name)
    requests = [greedy(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(random_prompts(3, longest=24))]
    asked = [replace(one, params=replace(one.params, num_logprobs=1 << 20)) for one in requests]
    engine = build_engine(replace(config_of(family.path), dtype="bfloat16", max_num_seqs=2))
    ratios: list[float] = []
    for request, emissions in zip(requests, emissions_of(engine, asked).values(), strict=True):
        entries = [entry for emission in emissions for entry in emission.logprobs]
        found = torch.tensor([[logprob for _, logprob in sorted(entry.top)] for entry in entries])
        output = [token_id for emission in emissions for token_id in emission.token_ids]
        text = (*request.prompt_ids, *output[:-1])
        exact, rounded = (family.logits(text, dtype)[-NUM_TOKENS:].log_softmax(-1) for dtype in BOTH)
        ours, theirs = ((one - exact).square().mean(dim=-1).sqrt() for one in (found, rounded))
        ratios += (ours / theirs).tolist()
    assert median(ratios) < 1.2
    assert replays.are_there
