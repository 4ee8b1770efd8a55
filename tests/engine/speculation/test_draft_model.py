"""What a small model guesses is what it would write itself, whatever became of its last guesses."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ports import DraftText
from engine.request import Request, RequestId
from engine.speculation.draft_model import CATCH_UP_TOKENS, DraftModel
from tests.engine.scripted import ScriptedGate, ScriptedRunner, a_config, a_request
from tests.oracles.naive_scheduler import VOCAB_SIZE, answer_alone

MAX_MODEL_LEN = 160
CONFIG = a_config(max_num_seqs=3, max_batched_tokens=128, max_model_len=MAX_MODEL_LEN, num_blocks=64)


class Guessing:
    """A draft model on a scripted device, where each step takes a second."""

    def __init__(self, failing: frozenset[str] = frozenset(), **changes: object) -> None:
        self.config = replace(CONFIG, **changes)  # type: ignore[arg-type]
        self.runner = ScriptedRunner(self.config, ScriptedGate(), failing)
        self.wish = threading.Event()
        self._now_s = 0.0
        self.model = DraftModel(self.config, self.runner, VOCAB_SIZE, pause_wish=self.wish, clock=self._tick)

    def _tick(self) -> float:
        self._now_s += 1.0
        return self._now_s

    def draft(self, request: Request, output_ids: Sequence[int], count: int = 4) -> list[int]:
        (found,) = self.model.draft([DraftText(request, output_ids)], count, read_s=1.0)
        return found

    def read(self, request: Request, output_ids: Sequence[int]) -> None:
        """Have a long text read: every call reads a part."""
        while not self.draft(request, output_ids, 1):
            pass


def continued(request: Request, output_ids: Sequence[int], count: int) -> list[int]:
    """What the small model itself would write: it knows no adapter, and follows no grammar."""
    params = replace(request.params, grammar=None, max_tokens=len(output_ids) + count, min_tokens=0)
    alone = replace(request, adapter=None, params=params, prior_output_ids=tuple(output_ids))
    return list(answer_alone(alone, MAX_MODEL_LEN).token_ids)


@st.composite
def asked(draw: st.DrawFn, names: Sequence[str]) -> list[tuple[str, int, int]]:
    """The texts of one call, and for each how many of its guesses are right and how many tokens follow them."""
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    return [(name, draw(st.integers(0, 5)), draw(st.integers(1, 3))) for name in chosen]


@given(
    st.lists(st.integers(1, 40), min_size=5, max_size=5),
    st.lists(st.tuples(asked("abcde"), st.integers(1, 5)), max_size=12),
    st.sampled_from([(0,), (0, 8)]),
    st.integers(40, 90),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_guess_is_what_the_small_model_would_write(
    prompts: list[int],
    calls: list[tuple[list[tuple[str, int, int]], int]],
    windows: tuple[int, ...],
    num_blocks: int,
    data: st.DataObject,
) -> None:
    """Texts that come and go, with fewer rows and blocks than all of them need."""
    guessing = Guessing(windows=windows, num_blocks=num_blocks * len(windows))
    token_ids = st.integers(1, VOCAB_SIZE - 1)
    request_by_name = {
        name: a_request(
            name,
            data.draw(st.lists(token_ids, min_size=size, max_size=size)),
            adapter=data.draw(st.sampled_from([None, "x"])),
        )
        for name, size in zip("abcde", prompts, strict=True)
    }
    outputs: dict[str, list[int]] = {name: [1] for name in "abcde"}
    for texts, count in calls:
        wanted = [DraftText(request_by_name[name], outputs[name]) for name, _, _ in texts]
        for (name, num_right, num_more), draft in zip(texts, guessing.model.draft(wanted, count, 1.0), strict=True):
            if draft:
                assert draft == continued(request_by_name[name], outputs[name], count)
            outputs[name] += draft[:num_right]
            outputs[name] += data.draw(st.lists(token_ids, min_size=num_more, max_size=num_more))
    model = guessing.model
    held = [block for reading in model._reading_by_id.values() for table in reading.tables for block in table]
    assert sorted([*held, *model._free_blocks]) == [*range(guessing.config.num_blocks)]
    rows = [reading.row for reading in model._reading_by_id.values()]
    assert sorted([*rows, *model._free_rows]) == [0, 1, 2]


def test_a_text_is_read_once_and_then_only_what_is_new() -> None:
    guessing = Guessing()
    request = a_request("a", range(1, 20))
    first = guessing.draft(request, [1])
    assert [plan.num_tokens for plan in guessing.runner.plans] == [20, 1, 1, 1]
    # All are right, and one more was drawn behind them; the last guess was never computed.
    second = guessing.draft(request, [1, *first, 3])
    assert [plan.num_tokens for plan in guessing.runner.plans[4:]] == [2, 1, 1, 1]
    # None is right.
    guessing.draft(request, [1, *first, 3, (second[0] + 1) % VOCAB_SIZE])
    assert [plan.num_tokens for plan in guessing.runner.plans[8:]] == [1, 1, 1, 1]


def test_a_long_text_is_read_in_parts_while_others_are_continued() -> None:
    guessing = Guessing()
    long, short = a_request("long", [1] * 130), a_request("short")
    texts = [DraftText(long, [1]), DraftText(short, [1])]
    calls = [guessing.model.draft(texts, 2, read_s=1.0) for _ in range(3)]
    assert [[len(draft) for draft in drafts] for drafts in calls] == [[0, 2], [0, 2], [2, 2]]
    # Of the parts after the first, the cost is known: a step takes a second.
    reads = [plan.num_tokens for plan in guessing.runner.plans if plan.num_tokens > CATCH_UP_TOKENS]
    assert reads == [64, 64]


def test_what_it_does_not_know_or_has_no_room_for_is_not_guessed() -> None:
    guessing = Guessing(vocab_size=VOCAB_SIZE - 4)
    known, unknown = a_request("known"), a_request("unknown", [1, VOCAB_SIZE - 4])
    assert guessing.draft(unknown, [1]) == []
    assert guessing.draft(known, [1, VOCAB_SIZE - 1]) == []
    assert guessing.draft(a_request("long", [1] * MAX_MODEL_LEN), [1]) == []
    # A token that it knows and the large model does not ends the draft.
    larger = DraftModel(CONFIG, ScriptedRunner(CONFIG, ScriptedGate()), vocab_size=12)
    (draft,) = larger.draft([DraftText(known, [1])], 12, 1.0)
    whole = continued(known, [1], 12)
    assert draft == whole[: next(index for index, token_id in enumerate(whole) if token_id >= 12)]


def test_a_row_that_fails_ends_its_draft_alone() -> None:
    guessing = Guessing(frozenset({"bad"}))
    bad, good = a_request("bad"), a_request("good")
    assert guessing.model.draft([DraftText(bad, [1]), DraftText(good, [1])], 3, 1.0) == [[], continued(good, [1], 3)]
    assert guessing.draft(bad, [1, 2]) == []


def test_another_request_of_the_same_id_is_another_text() -> None:
    guessing = Guessing()
    assert guessing.draft(a_request("a"), [1])
    other = a_request("a", [4, 5, 6, 7])
    assert guessing.draft(other, [2]) == continued(other, [2], 4)


def test_a_draft_ends_early_if_somebody_waits() -> None:
    guessing = Guessing()
    guessing.wish.set()
    assert guessing.draft(a_request("a"), [1]) == continued(a_request("a"), [1], 1)


def test_a_cost_is_measured_and_doubted_while_it_is_not() -> None:
    guessing = Guessing()
    assert guessing.model.token_s == 0.0
    guessing.draft(a_request("a"), [1])
    assert guessing.model.token_s == 1.0
    for _ in range(1000):
        guessing.model.decline()
    assert 0.0 < guessing.model.token_s < 0.2


def test_what_reading_costs_is_no_cost_of_a_guess() -> None:
    guessing = Guessing()
    request = a_request("a", [1] * 100)
    for _ in range(2):
        assert guessing.model.draft([DraftText(request, [1])], 1, read_s=0.1) == [[]]
    # The second part is as small as one gets, since the first took longer than it may.
    assert [plan.num_tokens for plan in guessing.runner.plans] == [64, CATCH_UP_TOKENS]
    assert guessing.model._read_token_s > 1 / 64
    # The rest is read with the first guess.
    assert len(guessing.draft(request, [1], 1)) == 1
    assert guessing.model.token_s == 0.0
    assert len(guessing.draft(request, [1], 2)) == 2
    assert guessing.model.token_s == 1.0


def test_what_only_the_large_model_follows_is_left_out() -> None:
    guessing = Guessing(vocab_size=8)
    request = a_request(
        "a", logit_bias=((3, 1.0), (9, 1.0)), allowed_token_ids=(2, 9), grammar="g", num_logprobs=2, min_tokens=1
    )
    seen = guessing.model._seen(replace(request, request_id=RequestId("b"), adapter=None, prior_output_ids=(1,)))
    assert (seen.params.logit_bias, seen.params.allowed_token_ids) == (((3, 1.0),), (2,))
    assert (seen.params.grammar, seen.params.num_logprobs, seen.params.min_tokens) == (None, None, 1)
    assert seen.prior_output_ids == ()
