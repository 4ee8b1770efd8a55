from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from kernels.logit_edits.reference import mask, penalize
from tests.oracles import naive_sampler

# Multiples of 1/8 are exact in float32, and make ties likely.
LOGITS = st.lists(st.integers(-80, 80).map(lambda i: i / 8), min_size=1, max_size=40)


def row(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


@settings(max_examples=50, deadline=None)
@given(
    LOGITS,
    st.data(),
    st.sampled_from([1.0, 0.5, 1.3]),
    st.sampled_from([0.0, -1.5, 0.75]),
    st.sampled_from([0.0, -0.5, 2.0]),
)
def test_penalties_follow_their_definition(
    values: list[float], data: st.DataObject, repetition: float, frequency: float, presence: float
) -> None:
    token = st.integers(0, len(values) - 1)
    prompt = data.draw(st.lists(token, max_size=10))
    output = data.draw(st.lists(token, max_size=10))
    params = SamplingParams(
        max_tokens=1, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    in_prompt = torch.zeros(1, len(values), dtype=torch.bool)
    in_prompt[0, prompt] = True
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(values)).int().unsqueeze(0)
    penalized = penalize(
        row(values),
        in_prompt,
        counts,
        repetition=torch.tensor([[repetition]]),
        frequency=torch.tensor([[frequency]]),
        presence=torch.tensor([[presence]]),
    )
    torch.testing.assert_close(penalized, row(naive_sampler.edited(values, params, prompt, output, ())))


def test_a_mask_leaves_numbers_that_are_none_visible() -> None:
    masked = torch.tensor([[1.0, torch.nan, torch.nan, -2.0]])
    mask(masked, torch.tensor([[True, True, False, False]]))
    assert masked[0, 0] == 1
    assert masked[0, 1:3].isnan().all()
    assert masked[0, 3] == -torch.inf
