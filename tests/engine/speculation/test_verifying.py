"""What is drawn behind drafts, in a few rows at once, is what a sampler draws one token after the other."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import grammar_from

from engine.request import DryPenalty, LzPenalty, Request, RequestId, SamplingParams, TokenLogprobs
from engine.sampling.grammar import GrammarStore
from engine.sampling.sampler import NOT_FINITE, Sampler
from engine.speculation.verifying import draw_behind
from engine.step import StepRow
from tests.parity.conftest import BUNDLED

VOCAB, EOS = 97, 0
PROMPT = (5, 6, 7, 5, 6)
ROWS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "num_logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"dry": DryPenalty(multiplier=0.8), "lz": LzPenalty(strength=0.3)},
    {"logit_bias": ((3, 2.0),), "bad_words": ((4, 5), (6,)), "min_tokens": 3},
    {"xtc_probability": 0.5, "typical_p": 0.9, "allowed_token_ids": tuple(range(1, 40))},
)


def a_row(index: int, draft_ids: tuple[int, ...], **params: Any) -> StepRow:
    request = Request(
        request_id=RequestId(f"r{index}"),
        prompt_ids=PROMPT,
        params=SamplingParams(**{"max_tokens": 50, "seed": index} | params),
    )
    return StepRow(index, True, request, [], 4, 5, [0], True, draft_ids=draft_ids)


def admitted(rows: list[StepRow], grammars: GrammarStore | None = None, vocab: int = VOCAB) -> Sampler:
    sampler = Sampler(len(rows), vocab, torch.device("cpu"), [EOS], grammars)
    for row in rows:
        sampler.admit(row.row, row.request, [])
    return sampler


def drafted(sampler: Sampler, logits: torch.Tensor, rows: list[StepRow]) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Draw for a step that has computed `logits` [rows, places, vocab], as a runner does."""
    lines = [sum(1 + len(other.draft_ids) for other in rows[:index]) for index in range(len(rows))]
    flat = torch.cat([logits[index, : 1 + len(row.draft_ids)] for index, row in enumerate(rows)])
    drawn = sampler.sample(flat[lines], [row.row for row in rows], [row.end for row in rows])
    return [(found.token_ids, found.logprobs) for found in draw_behind(sampler, flat, lines, rows, drawn)]


def one_by_one(
    sampler: Sampler, logits: torch.Tensor, row: StepRow, count: int
) -> tuple[list[int], list[TokenLogprobs]]:
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while len(token_ids) < count:
        place = len(token_ids)
        result = sampler.sample(logits[row.row, place : place + 1].clone(), [row.row], [row.end + place])
        token_ids += [*result.token_ids, *result.forced.get(row.row, [])]
        logprobs += result.logprobs.values()
    return token_ids, logprobs


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(ROWS), min_size=1, max_size=5), st.integers(0, 99), st.data())
def test_rows_of_every_kind(kinds: list[dict[str, Any]], seed: int, data: st.DataObject) -> None:
    logits = torch.randn(len(kinds), 7, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    plain = [a_row(index, (), **kind) for index, kind in enumerate(kinds)]
    expected = [one_by_one(admitted(plain), logits, row, 7) for row in plain]
    num_right, rows = [], []
    for row, (token_ids, _) in zip(plain, expected, strict=True):
        draft = token_ids[: data.draw(st.integers(0, 6))]
        wrong_at = data.draw(st.integers(0, 2 * len(draft)))
        if wrong_at < len(draft):
            draft[wrong_at] = draft[wrong_at] % (VOCAB - 1) + 1
        num_right.append(min(wrong_at, len(draft)))
        rows.append(row._replace(draft_ids=tuple(draft)))
    sampler = admitted(rows)
    found = drafted(sampler, logits, rows)
    for (token_ids, logprobs), (all_ids, all_logprobs), right in zip(found, expected, num_right, strict=True):
        assert token_ids == all_ids[: right + 1]
        assert logprobs == all_logprobs[: right + 1]
    # And the sampler knows what was drawn, and no more.
    for row, (token_ids, _), (all_ids, _) in zip(rows, found, expected, strict=True):
        if len(token_ids) < 7:
            place = len(token_ids)
            (next_id,) = sampler.sample(
                logits[row.row, place : place + 1].clone(), [row.row], [row.end + place]
            ).token_ids
            assert next_id == all_ids[place]


def test_what_is_right_has_log_probabilities_of_its_own() -> None:
    logits = torch.randn(1, 4, VOCAB, generator=torch.Generator().manual_seed(0))
    plain = a_row(0, (), num_logprobs=2)
    expected = one_by_one(admitted([plain]), logits, plain, 4)
    rows = [plain._replace(draft_ids=tuple(expected[0][:3]))]
    assert drafted(admitted(rows), logits, rows) == [expected]
    assert len(expected[1]) == 4


def test_tokens_that_a_grammar_forces_are_a_part_of_what_is_right() -> None:
    vocab = json.loads((BUNDLED / "config.json").read_text())["vocab_size"]
    grammars = GrammarStore(str(BUNDLED), vocab, [EOS])
    grammar = grammar_from("regex", "(left|right): the same for both, [0-9]{4}")
    logits = torch.randn(1, 40, vocab, generator=torch.Generator().manual_seed(3))
    plain = [a_row(0, (), grammar=grammar)]
    expected, _ = one_by_one(admitted(plain, grammars, vocab), logits, plain[0], 12)
    for count in range(11):
        rows = [plain[0]._replace(draft_ids=tuple(expected[:count]))]
        ((found, _),) = drafted(admitted(rows, grammars, vocab), logits, rows)
        assert found == expected[: len(found)]
        assert len(found) > count
    wrong = [plain[0]._replace(draft_ids=(expected[0], expected[1] + 1, *expected[2:9]))]
    ((found, _),) = drafted(admitted(wrong, grammars, vocab), logits, wrong)
    assert found == expected[: len(found)]


def test_who_fails_behind_a_draft_keeps_what_came_before() -> None:
    rows = [a_row(0, (1, 2, 3), temperature=0.0), a_row(1, (1, 2, 3), temperature=0.0)]
    logits = torch.zeros(2, 4, VOCAB)
    for place in range(4):
        logits[:, place, place + 1] = 1.0
    logits[0, 2] = torch.nan
    found = [token_ids for token_ids, _ in drafted(admitted(rows), logits, rows)]
    assert found == [[1, 2], [1, 2, 3, 4]]


@pytest.mark.parametrize("draft_ids", [(), (1, 2)])
def test_who_fails_at_once_has_failed(draft_ids: tuple[int, ...]) -> None:
    rows = [a_row(0, draft_ids)]
    logits = torch.full((3, VOCAB), torch.nan)
    sampler = admitted(rows)
    drawn = sampler.sample(logits[:1].clone(), [0], [5])
    assert drawn.failed == {0: NOT_FINITE}
    assert len(draw_behind(sampler, logits, [0], rows, drawn)) == 1
