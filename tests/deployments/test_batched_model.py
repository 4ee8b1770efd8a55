"""Items that come together, or during a call, share the next one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from deployments.batched_model import MAX_CALL_CHARS, NEW_URGENT_SHARE, PROMISED_SHARE, BatchedModel, limited
from engine.errors import OverloadError


class Doubler:
    """Doubles numbers, refuses a 13, notes its batches, and can be held in the middle of one."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, numbers: list[int]) -> Sequence[int]:
        self.batches.append(numbers)
        self.gate.wait(30)
        if 13 in numbers:
            raise ValueError("13")
        return [2 * number for number in numbers]


def a_model(call: Doubler, num_chars: Callable[[int], int] = lambda number: 1) -> BatchedModel[int, int]:
    return BatchedModel(call, "doubler", max_batch=3, num_chars=num_chars, max_wait_s=3600.0)


async def held(doubler: Doubler, model: BatchedModel[int, int], numbers: Sequence[int]) -> asyncio.Task[list[int]]:
    """Ask for numbers, and return once a call has begun, which ends when the doubler's gate is opened."""
    doubler.gate.clear()
    asked = asyncio.create_task(model.results(numbers))
    async with asyncio.timeout(30):
        while not doubler.batches:
            await asyncio.sleep(0.001)
    return asked


async def test_what_comes_together_is_called_together_up_to_the_bound() -> None:
    doubler = Doubler()
    model = a_model(doubler)
    async with asyncio.timeout(30):
        assert await asyncio.gather(model.results([1, 2]), model.results([3]), model.results([4, 5, 6])) == [
            [2, 4],
            [6],
            [8, 10, 12],
        ]
    assert doubler.batches == [[1, 2, 3], [4, 5, 6]]
    assert await model.results([]) == []


async def test_what_nobody_waits_for_any_more_is_not_called() -> None:
    doubler = Doubler()
    model = a_model(doubler)
    first = await held(doubler, model, [1])
    left, stayed = (asyncio.create_task(model.results(numbers)) for numbers in ([2, 3, 4], [5]))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    doubler.gate.set()
    assert await asyncio.gather(first, stayed) == [[2], [10]]
    assert doubler.batches == [[1], [5]]


async def test_a_model_is_not_called_for_nothing_once_all_who_waited_have_left() -> None:
    doubler = Doubler()
    model = a_model(doubler)
    first = await held(doubler, model, [1])
    left = asyncio.create_task(model.results([2, 3]))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    doubler.gate.set()
    assert [await first, await model.results([4])] == [[2], [8]]
    assert doubler.batches == [[1], [4]]


async def test_what_is_urgent_goes_first() -> None:
    doubler = Doubler()
    model = a_model(doubler)
    first = await held(doubler, model, [1])
    calls = [asyncio.create_task(model.results([2, 3, 4])), asyncio.create_task(model.results([5, 6], is_urgent=True))]
    await asyncio.sleep(0)
    doubler.gate.set()
    assert await asyncio.gather(first, *calls) == [[2], [4, 6, 8], [10, 12]]
    assert doubler.batches == [[1], [5, 6, 2], [3, 4]]


async def test_who_asks_for_little_does_not_wait_for_who_asks_for_much() -> None:
    """A moderation of many long texts held up every stream until the classifier's time limit ended them."""
    doubler = Doubler()
    model = a_model(doubler)
    first = await held(doubler, model, [1])
    calls = [asyncio.create_task(model.results(numbers)) for numbers in ([2, 3, 4, 5, 6], [7], [8, 9])]
    await asyncio.sleep(0)
    doubler.gate.set()
    assert await asyncio.gather(first, *calls) == [[2], [4, 6, 8, 10, 12], [14], [16, 18]]
    assert doubler.batches == [[1], [2, 7, 8], [3, 9, 4], [5, 6]]


async def test_long_requests_are_completed_one_by_one() -> None:
    """In equal turns, all of an overload would be late, and nothing of it useful."""
    doubler = Doubler()
    model = a_model(doubler)
    async with asyncio.timeout(30):
        await asyncio.gather(model.results([1, 2, 3, 4]), model.results([5, 6, 7, 8]))
    assert doubler.batches == [[1, 2, 3], [4, 5, 6], [7, 8]]


async def test_the_oldest_request_is_not_overtaken_for_ever() -> None:
    doubler = Doubler()
    model = a_model(doubler)
    calls = [await held(doubler, model, [1, 2, 3, 4, 5, 6])]
    calls += [asyncio.create_task(model.results([number])) for number in (7, 8, 9, 10, 11, 12)]
    await asyncio.sleep(0)
    doubler.gate.set()
    await asyncio.gather(*calls)
    assert doubler.batches == [[1, 2, 3], [4, 7, 8], [5, 6, 9], [10, 11, 12]]


async def test_a_call_holds_a_bounded_amount_of_text_but_at_least_one_item() -> None:
    doubler = Doubler()
    model = a_model(doubler, num_chars=lambda number: number * MAX_CALL_CHARS // 4)
    async with asyncio.timeout(30):
        assert await model.results([2, 2, 1, 5, 1, 3]) == [4, 4, 2, 10, 2, 6]
    assert doubler.batches == [[2, 2], [1], [5], [1, 3]]


async def test_what_is_urgent_leaves_every_second_call_to_the_others() -> None:
    """A long input that did not fit beside the text of running answers waited for as long as any came."""
    doubler = Doubler()
    model = a_model(doubler, num_chars=lambda number: MAX_CALL_CHARS if number < 5 else 1)
    calls = [await held(doubler, model, [9])]
    calls.append(asyncio.create_task(model.results([1, 2])))
    calls += [asyncio.create_task(model.results([number] * 3, is_urgent=True)) for number in (6, 7, 8)]
    await asyncio.sleep(0)
    doubler.gate.set()
    await asyncio.gather(*calls)
    assert doubler.batches == [[9], [6, 6, 6], [1], [7, 7, 7], [2], [8, 8, 8]]


async def test_an_item_that_fails_a_call_fails_its_own_request_only() -> None:
    """A text with a token that the model has no embedding for failed the texts of others that shared its call."""
    doubler = Doubler()
    model = a_model(doubler)
    answers = await asyncio.gather(model.results([1]), model.results([13]), return_exceptions=True)
    assert answers[0] == [2]
    assert isinstance(answers[1], ValueError)
    assert doubler.batches == [[1, 13], [1], [13]]
    assert await model.results([1]) == [2]


async def test_what_a_failed_request_still_waits_for_is_not_called() -> None:
    doubler = Doubler()
    with pytest.raises(ValueError, match="13"):
        await (model := a_model(doubler)).results([13, *range(20, 32)])
    assert await model.results([1]) == [2]
    assert sum(map(len, doubler.batches)) < 12


class Timed(Doubler):
    """Takes a second for each call, by its own clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def __call__(self, numbers: list[int]) -> Sequence[int]:
        found = super().__call__(numbers)
        self.now_s += 1.0
        return found


async def timed(max_wait_s: float) -> tuple[Timed, BatchedModel[int, int]]:
    """Return a model whose pace is known: a second for each number over 9, or for three below."""
    doubler = Timed()
    model: BatchedModel[int, int] = BatchedModel(
        doubler,
        "doubler",
        max_batch=3,
        num_chars=lambda number: MAX_CALL_CHARS if number > 9 else MAX_CALL_CHARS // 4,
        max_wait_s=max_wait_s,
        clock=lambda: doubler.now_s,
    )
    await model.results([10, 11, 12])
    doubler.batches.clear()
    return doubler, model


async def test_who_would_wait_too_long_is_refused_before_any_work_and_told_when_there_is_room() -> None:
    """The model was always at those whose time was about to be up: nearly nothing of an overload was completed."""
    doubler, model = await timed(max_wait_s=3 / PROMISED_SHARE)
    calls = [await held(doubler, model, [14])]
    calls += [asyncio.create_task(model.results([number])) for number in (15, 16)]
    await asyncio.sleep(0)
    calls.append(asyncio.create_task(model.results([17])))
    await asyncio.sleep(0)
    with pytest.raises(OverloadError, match="waiting for the doubler") as refused:
        await model.results([18])
    assert refused.value.retry_after_s == pytest.approx(1.0)
    calls[1].cancel()
    await asyncio.wait(calls[1:2])
    calls[1] = asyncio.create_task(model.results([19]))
    doubler.gate.set()
    assert await asyncio.gather(*calls) == [[28], [38], [32], [34]]
    assert await model.results([18]) == [36]


async def test_only_what_goes_before_a_request_counts_and_neither_its_own_size_nor_who_is_longer() -> None:
    doubler, model = await timed(max_wait_s=3 / PROMISED_SHARE)
    calls = [await held(doubler, model, [*range(20, 40)])]
    calls += [asyncio.create_task(model.results([1])), asyncio.create_task(model.results([14], is_urgent=True))]
    await asyncio.sleep(0)
    with pytest.raises(OverloadError):
        await model.results([*range(40, 70)])
    doubler.gate.set()
    assert await asyncio.gather(*calls) == [[*range(40, 80, 2)], [2], [28]]


async def test_an_urgent_request_that_comes_again_has_precedence_over_one_that_is_new() -> None:
    """Whoever came when there was room was taken: a running answer might find none for a minute, and was lost."""
    doubler, model = await timed(max_wait_s=2 / NEW_URGENT_SHARE)
    calls = [await held(doubler, model, [14])]
    calls += [asyncio.create_task(model.results([number], is_urgent=True)) for number in (15, 16)]
    await asyncio.sleep(0)
    for number in (17, 18):
        with pytest.raises(OverloadError) as refused:
            await model.results([number], is_urgent=True)
        assert refused.value.retry_after_s == pytest.approx(1.0)
    calls.append(asyncio.create_task(model.results([18], is_urgent=True)))
    await asyncio.sleep(0)
    with pytest.raises(OverloadError):
        await model.results([19], is_urgent=True)
    doubler.gate.set()
    assert await asyncio.gather(*calls) == [[28], [30], [32], [36]]


async def test_a_pace_that_was_learned_too_slow_is_learned_anew() -> None:
    """After one call that stood still, whoever came during any later one was refused, for ever."""
    doubler, model = await timed(max_wait_s=3 / PROMISED_SHARE)
    model._pace.took_s *= 20
    for number in range(40, 80):
        assert await model.results([number]) == [2 * number]
        doubler.batches.clear()
    assert model._pace.seconds(MAX_CALL_CHARS) == pytest.approx(1.0, rel=0.2)


async def test_what_comes_during_a_call_makes_it_no_fuller() -> None:
    """Short texts taught how long a character takes, and longer ones were refused."""
    doubler, model = await timed(max_wait_s=3 / PROMISED_SHARE)
    pace_s = model._pace.seconds(MAX_CALL_CHARS)
    calls = [await held(doubler, model, [1])]
    calls.append(asyncio.create_task(model.results([2])))
    await asyncio.sleep(0)
    doubler.gate.set()
    assert await asyncio.gather(*calls) == [[2], [4]]
    assert model._pace.seconds(MAX_CALL_CHARS) == pace_s


async def test_a_model_whose_calls_leave_nothing_waiting_refuses_nobody() -> None:
    """How long a call for one short text takes says little of what the model could do."""
    doubler = Timed()
    model: BatchedModel[int, int] = BatchedModel(
        doubler, "doubler", max_batch=3, num_chars=lambda n: 1, max_wait_s=1.0, clock=lambda: doubler.now_s
    )
    assert await model.results([1]) == [2]
    doubler.batches.clear()
    calls = [await held(doubler, model, [2])]
    calls += [asyncio.create_task(model.results([3])) for _ in range(20)]
    await asyncio.sleep(0)
    doubler.gate.set()
    assert await asyncio.gather(*calls) == [[4], *[[6]] * 20]


@pytest.mark.parametrize(
    ("sizes", "wanted_s"),
    [([], 5), ([1] * 32, 5), ([MAX_CALL_CHARS], 5), ([1] * 33, 10), ([MAX_CALL_CHARS, 1], 10), ([100_000], 245)],
)
def test_the_time_limit_is_for_each_call_that_a_request_fills(sizes: list[int], wanted_s: float) -> None:
    with limited("It gave nothing", 5.0, sizes, 32) as limit_s:
        assert limit_s == wanted_s


async def test_long_items_of_the_oldest_request_leave_every_second_call_to_the_others() -> None:
    """Whoever asked after a text of 100,000 characters waited until all of it was judged."""
    doubler = Doubler()
    model = a_model(doubler, num_chars=lambda number: MAX_CALL_CHARS if number > 9 else 1)
    calls = [await held(doubler, model, [10, 11, 12])]
    calls += [asyncio.create_task(model.results([number] * 3)) for number in (7, 8)]
    await asyncio.sleep(0)
    doubler.gate.set()
    await asyncio.gather(*calls)
    assert doubler.batches == [[10], [11], [7, 7, 7], [12], [8, 8, 8]]


async def test_so_do_they_beside_what_is_urgent() -> None:
    doubler = Doubler()
    model = a_model(doubler, num_chars=lambda number: MAX_CALL_CHARS if number > 4 else 1)
    calls = [await held(doubler, model, [10, 11, 12])]
    calls += [asyncio.create_task(model.results([4]))]
    calls += [asyncio.create_task(model.results([number], is_urgent=True)) for number in (5, 6, 7, 8)]
    await asyncio.sleep(0)
    doubler.gate.set()
    await asyncio.gather(*calls)
    assert doubler.batches == [[10], [5], [11], [6], [4], [7], [12], [8]]
