"""What layers keep of each row: noted without numbers, and handed to their modules by rows."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from engine.fallback.spec import StateForm, StateKey
from engine.fallback.states import RowStates
from engine.step import Snapshot, StateMoves

CONV, SUM = StateKey(3, "conv", 0), StateKey(3, "recurrent", 0)
FORMS = {CONV: StateForm((2, 3), is_wide=False), SUM: StateForm((2,), is_wide=True)}


def remember(x: torch.Tensor, cache: Any, **_: int) -> torch.Tensor:
    """Stand for a module: to each token the sum of all before it, and what came three tokens ago."""
    ago = cache.update_conv_state(x.transpose(1, 2), 3, conv_kernel_size=3)[..., -x.shape[1] - 3 : -3]
    sums = cache.get_recurrent_state(3).unsqueeze(1) + x.cumsum(dim=1)
    cache.update_recurrent_state(sums[:, -1], layer_idx=3)
    return sums + 100 * ago.transpose(1, 2)


def expected(text: torch.Tensor) -> torch.Tensor:
    ago = torch.cat([torch.zeros(3, 2), text])[: len(text)]
    return text.cumsum(dim=0) + 100 * ago


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7))
def test_each_text_is_computed_as_if_it_were_alone_in_whatever_parts(seed: int, lengths: list[int]) -> None:
    """More texts than rows: a row is given to another one when its text has ended.

    Steps of one token per row are computed with padding and without the host knowing the rows, as a recording has them.
    """
    chance, numbers = Random(seed), torch.Generator().manual_seed(seed)
    states = RowStates(FORMS, 3, torch.float32, torch.device("cpu"))
    texts = [torch.randint(1, 9, (length, 2), generator=numbers).float() for length in lengths]
    done = [torch.empty(0, 2) for _ in texts]
    waiting, row_by_text = list(range(len(texts))), dict[int, int]()
    while waiting or row_by_text:
        for row in sorted({0, 1, 2} - set(row_by_text.values()))[: len(waiting)]:
            row_by_text[waiting.pop()] = row
        counts = {text: chance.randint(0, len(texts[text]) - len(done[text])) for text in row_by_text}
        order = sorted((text for text in counts if counts[text]), key=lambda text: counts[text] > 1)
        ends = list(accumulate((counts[text] for text in order), initial=0))
        rows = [[at, len(done[text]), counts[text], row_by_text[text]] for at, text in zip(ends, order, strict=False)]
        if rows:
            x = torch.cat([texts[text][start : start + n] for text, (_, start, n, _) in zip(order, rows, strict=True)])
            if all(count == 1 for _, _, count, _ in rows):
                padded = torch.tensor([*rows, [len(rows), 0, 0, 0], [len(rows) + 1, 0, 0, 0]])
                x = torch.cat([x, torch.full((2, 2), torch.nan)])
                y = states.call_singles(remember, 3, x.unsqueeze(0), states.singles(padded))[0]
            else:
                y = states.call(remember, 3, x.unsqueeze(0), rows)[0]
            for text, (first, _, count, _) in zip(order, rows, strict=True):
                done[text] = torch.cat([done[text], y[first : first + count]])
        row_by_text = {text: row for text, row in row_by_text.items() if len(done[text]) < len(texts[text])}
    for found, text in zip(done, texts, strict=True):
        assert torch.equal(found, expected(text))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), seed=st.integers(0, 10_000), length=st.integers(2, 30))
def test_a_text_goes_on_from_any_state_that_was_kept_of_it(data: st.DataObject, seed: int, length: int) -> None:
    """Whatever the place held before, and however the row is computed before and after."""
    states = RowStates(FORMS, 2, torch.float32, torch.device("cpu"))
    states.make_room(3)
    poisoned = states._kept[3]
    for state in poisoned.values():
        state.fill_(torch.nan)
    text = torch.randint(1, 9, (length, 2), generator=torch.Generator().manual_seed(seed)).float()
    marks = sorted(data.draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=3)))
    cuts = sorted({*data.draw(st.sets(st.integers(1, length - 1), max_size=4)), 0, length})
    places = data.draw(st.permutations(range(3)))
    for start, end in pairwise(cuts):
        kept = [Snapshot(mark, places[i]) for i, mark in enumerate(marks) if start < mark <= end]
        x = text[start:end].unsqueeze(0)
        found = states.call(remember, 3, x, [[0, start, end - start, 1]], {1: kept} if kept else {})
        assert torch.equal(found[0], expected(text)[start:end])
    for mark, place in zip(marks, places, strict=False):
        states.begin(StateMoves(((0, place),), {}))
        found = states.call(remember, 3, text[mark:].unsqueeze(0), [[0, mark, length - mark, 0]])
        assert torch.equal(found[0], expected(text)[mark:])
    if len(marks) < 3:
        assert all(state[places[-1]].isnan().all() for state in poisoned.values())


def test_of_two_modules_of_a_layer_each_is_kept_where_it_is_itself() -> None:
    """One has computed the whole chunk before the other begins with its first part."""
    keys = [StateKey(3, "recurrent", number) for number in range(2)]
    states = RowStates({key: StateForm((1,), is_wide=True) for key in keys}, 1, torch.float32, torch.device("cpu"))
    states.make_room(1)

    def add_up(x: torch.Tensor, cache: Any, number: int, **_: int) -> torch.Tensor:
        sums = cache.get_recurrent_state(3, number).unsqueeze(1) + x.cumsum(dim=1)
        cache.update_recurrent_state(sums[:, -1], 3, number)
        return sums

    kept, text = {0: [Snapshot(4, 0)]}, torch.ones(1, 8, 1)
    for number in range(2):
        states.call(partial(add_up, number=number), 3, text, [[0, 0, 8, 0]], kept)
    states.begin(StateMoves(((0, 0),), {}))
    for number in range(2):
        assert states.call(partial(add_up, number=number), 3, text[:, :1], [[0, 4, 1, 0]]).item() == 5


def test_of_rows_of_one_token_some_are_kept() -> None:
    states = RowStates(FORMS, 3, torch.float32, torch.device("cpu"))
    states.make_room(2)
    texts = torch.arange(1.0, 13.0).view(3, 2, 2)
    for position in range(2):
        kept = {2: [Snapshot(2, 0)], 0: [Snapshot(2, 1)]} if position else {}
        states.call(remember, 3, texts[:, position].unsqueeze(0), [[i, position, 1, i] for i in range(3)], kept)
    states.begin(StateMoves(((1, 0),), {}))
    more = torch.ones(1, 1, 2)
    found = states.call(remember, 3, more, [[0, 2, 1, 1]])[0, 0]
    assert torch.equal(found, torch.cat([texts[2], more[0]]).sum(dim=0))
    states.begin(StateMoves(((1, 1),), {}))
    assert torch.equal(states.call(remember, 3, more, [[0, 2, 1, 1]])[0, 0], texts[0].sum(dim=0) + 1)


def test_what_a_failed_text_has_left_is_not_found_by_the_next_one() -> None:
    states = RowStates(FORMS, 2, torch.float32, torch.device("cpu"))
    states.call(remember, 3, torch.full((1, 4, 2), torch.nan), [[0, 0, 4, 1]])
    text = torch.ones(4, 2)
    assert torch.equal(states.call(remember, 3, text.unsqueeze(0), [[0, 0, 4, 1]])[0], expected(text))
