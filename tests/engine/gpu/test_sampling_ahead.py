"""Sampling with the GPU's chooser: the next draw is asked for before anybody knows the last one's token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher

from engine.gpu import choosing
from engine.gpu.choosing import TokenChooser
from engine.gpu.runtime import CudaRuntime
from engine.request import Request, RequestId, SamplingParams, TokenLogprobs
from engine.sampling import sampler as sampling
from engine.sampling.grammar import GrammarStore
from engine.sampling.sampler import Sampler
from kernels.logit_edits.launch import edit_logits
from kernels.token_logprobs import reference
from kernels.token_logprobs.launch import MAX_TOP
from tests.kernels.gpu.conftest import DEVICE

VOCAB, STEPS = 600, 4
MODEL = Path(__file__).parents[3] / "models" / "stdlib-chat"
CONFIG = json.loads((MODEL / "config.json").read_text())
GRAMMAR_VOCAB, EOS = CONFIG["vocab_size"], CONFIG["eos_token_id"]
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.9, top_k=20, seed=1, num_logprobs=3),
    SamplingParams(max_tokens=9, temperature=1.3, top_p=0.8, seed=2, frequency_penalty=2.0, presence_penalty=1.0),
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=3.0, min_tokens=2),
    SamplingParams(max_tokens=9, temperature=1.0, top_k=30, top_p=0.9, min_p=0.05, seed=4, num_logprobs=0),
    SamplingParams(max_tokens=9, temperature=1.0, seed=5, logit_bias=((7, 5.0),)),
]

Told = tuple[list[int], dict[int, TokenLogprobs]]


def tokens_of(sampler: Sampler, *, ahead: bool) -> list[Told]:
    """Draw some steps of the same logits, so that only penalties and positions tell them apart."""
    for row, params in enumerate(PARAMS):
        sampler.admit(row, Request(request_id=RequestId(str(row)), prompt_ids=(5, 9), params=params), [])
    logits = torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 3
    rows = list(range(len(PARAMS)))
    drawings, results = [], []
    for step in range(STEPS):
        drawings.append(sampler.draw(logits.clone(), rows, [2 + step] * len(rows)))
        if len(drawings) > ahead:
            results.append(sampler.finish(drawings.pop(0)))
    results += [sampler.finish(drawing) for drawing in drawings]
    return [(result.token_ids, result.logprobs) for result in results]


def test_drawn_ahead_by_the_kernel_the_tokens_and_their_logprobs_are_those_of_torch() -> None:
    expected = tokens_of(Sampler(len(PARAMS), VOCAB, DEVICE, (3,)), ahead=False)
    chooser = TokenChooser(CudaRuntime(DEVICE), len(PARAMS), VOCAB)
    found = tokens_of(Sampler(len(PARAMS), VOCAB, DEVICE, (3,), choose=chooser), ahead=True)
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() == {0, 3}
        for row, entry in ours.items():
            assert entry.logprob == pytest.approx(theirs[row].logprob, abs=1e-5)
            assert entry.rank == theirs[row].rank
            assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in theirs[row].top]
            values = [value for _, value in theirs[row].top]
            assert [value for _, value in entry.top] == pytest.approx(values, abs=1e-5)
    # The penalties have had their say: by greedy choice the same logits would bring one token again and again.
    assert len({ids[2] for ids, _ in expected}) > 1


def test_grammars_and_penalties_are_applied_by_one_kernel_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarStore(str(MODEL), GRAMMAR_VOCAB, [EOS])
    word, number = (LLMatcher.grammar_from_regex(pattern) for pattern in ("(ab|ac|b)*", "[0-9]{3}"))
    asked = [
        SamplingParams(max_tokens=9, temperature=0.0, grammar=number),
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=9, temperature=0.0, grammar=word, frequency_penalty=3.0, logit_bias=((7, 5.0),)),
        SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=4.0),
        SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=(40, 41, 42, EOS), bad_words=((41, 40),)),
        SamplingParams(max_tokens=9, temperature=0.0, grammar=word, bad_words=((7,),), logit_bias=((7, 5.0),)),
    ]
    launched: list[int] = []
    monkeypatch.setattr(choosing, "edit_logits", lambda *given: launched.append(len(given[1])) or edit_logits(*given))

    def drawn(choose: TokenChooser | None) -> list[list[int]]:
        sampler = Sampler(len(asked), GRAMMAR_VOCAB, DEVICE, (EOS,), grammars, choose=choose)
        for row, params in enumerate(asked):
            if params.grammar is not None:
                grammars.compile(params.grammar)
            sampler.admit(row, Request(request_id=RequestId(str(row)), prompt_ids=(5, 9), params=params), [])
        logits = torch.randn(len(asked), GRAMMAR_VOCAB, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 3
        rows = [2, 0, 1, 3, 5, 4]
        return [sampler.sample(logits.clone(), rows, [2 + step] * len(rows)).token_ids for step in range(STEPS)]

    expected = drawn(None)
    assert drawn(TokenChooser(CudaRuntime(DEVICE), len(asked), GRAMMAR_VOCAB)) == expected
    # Neither the same again and again, nor failed.
    assert len({ids[0] for ids in expected}) > 1
    assert min(min(ids) for ids in expected) >= 0
    assert launched == [5] * STEPS


def test_more_likeliest_tokens_than_the_kernel_lists_are_told_by_torch() -> None:
    chooser, logits = TokenChooser(CudaRuntime(DEVICE), 2, 40), torch.randn(2, 40, device=DEVICE)
    token_ids = torch.tensor([3, 4], device=DEVICE)
    for num_top, told in ((MAX_TOP, MAX_TOP), (MAX_TOP + 1, MAX_TOP + 1), (99, 40)):
        found = chooser.tell(logits, token_ids, num_top)
        torch.testing.assert_close(found, reference.tell(logits, token_ids, told), rtol=1e-5, atol=1e-5)


def test_top_k_and_top_p_sort_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_draw", lambda *_: pytest.fail("candidates were sorted"))
    chooser = TokenChooser(CudaRuntime(DEVICE), len(PARAMS), VOCAB)
    tokens_of(Sampler(len(PARAMS), VOCAB, DEVICE, (3,), choose=chooser), ahead=True)
