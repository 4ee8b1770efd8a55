from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from deployments.errors import ReplicaLostError, UnavailableError
from deployments.gateway import resumption
from deployments.gateway.resumption import Resumption
from deployments.generation_calls import GenerationCall, pack_ids
from engine.errors import OverloadError
from engine.request import Emission, FinishReason, RequestId, SamplingParams, TokenLogprobs

CALL = GenerationCall(
    request_id=RequestId("r"),
    prompt_ids=pack_ids([1]),
    params=SamplingParams(max_tokens=9),
    prediction_ids=pack_ids([5]),
)


class Lost:
    """Replicas of which each but the last is lost behind its emissions."""

    def __init__(self, *attempts: Sequence[Emission] | Exception) -> None:
        self._attempts = list(attempts)
        self.calls: list[GenerationCall] = []

    async def tokens(self, call: GenerationCall) -> AsyncGenerator[Emission, None]:
        self.calls.append(call)
        attempt = self._attempts.pop(0)
        if isinstance(attempt, Exception):
            raise attempt
        for emission in attempt:
            yield emission
        if self._attempts:
            raise ReplicaLostError("gone")


def emission(token_id: int, *counts: int, reason: FinishReason | None = None) -> Emission:
    return Emission(
        request_id=RequestId("r"),
        token_ids=(token_id,),
        num_cached_tokens=3,
        num_accepted=counts[0],
        num_rejected=counts[1],
        finish_reason=reason,
    )


LAST = emission(3, 0, 0, reason=FinishReason.STOP)


async def test_of_a_prediction_all_replicas_together_are_counted() -> None:
    lost = Lost(
        [emission(1, 0, 0), emission(2, 4, 1)],
        [emission(3, 1, 0)],
        [emission(4, 0, 2), emission(5, 2, 2, reason=FinishReason.STOP)],
    )
    batches = [batch async for batch in Resumption(lost, CALL, max_resumes=2).tokens()]
    assert [batch.token_ids for batch in batches] == [(1,), (2,), (3,), (4,), (5,)]
    assert [(b.num_accepted, b.num_rejected) for b in batches] == [(0, 0), (4, 1), (5, 1), (5, 3), (7, 3)]
    assert {call.prediction_ids for call in lost.calls} == {CALL.prediction_ids}
    assert lost.calls[-1].prior_output_ids == pack_ids([1, 2, 3])


async def test_so_it_is_where_nothing_was_left_to_draw() -> None:
    call = replace(CALL, params=SamplingParams(max_tokens=2))
    lost = Lost([emission(1, 0, 0), emission(2, 4, 1)], [])
    batches = [batch async for batch in Resumption(lost, call, max_resumes=2).tokens()]
    assert (batches[-1].finish_reason, batches[-1].num_accepted, batches[-1].num_rejected) == (
        FinishReason.LENGTH,
        4,
        1,
    )


def full(reason: str) -> OverloadError:
    return OverloadError("Too many requests.", retry_after_s=1.0, reason=reason)


async def test_what_was_shown_in_part_waits_for_room_on_the_replicas_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the others full, a stream whose replica was killed ended with their refusal."""
    monkeypatch.setattr(resumption, "_POLL_S", 0.0)
    lost = Lost([emission(1, 0, 0)], full("replicas_full"), full("queue_full"), [emission(2, 0, 0), LAST])
    batches = [batch async for batch in Resumption(lost, CALL, max_resumes=1).tokens()]
    assert [batch.token_ids for batch in batches] == [(1,), (2,), (3,)]


@pytest.mark.parametrize(
    "attempts", [[full("replicas_full")], [[], full("queue_full")], [[emission(1, 0, 0)], full("busy")]]
)
async def test_nothing_else_that_is_refused_waits(attempts: list[Sequence[Emission] | Exception]) -> None:
    """Its client can still be told to come back; a gateway that stops must not begin anew."""
    found = Resumption(Lost(*attempts, [LAST]), CALL, max_resumes=1).tokens()
    with pytest.raises(OverloadError, match="Too many"):
        [batch async for batch in found]


async def test_all_attempts_share_the_time_of_the_request_and_each_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = [10.0], list[str]()

    def note_loss() -> None:
        told.append("lost")
        now_s[0] += 4.0

    monkeypatch.setattr(resumption.time, "monotonic", lambda: now_s[0])
    # On the second replica more of the prompt may be cached; the client is told of the first.
    lost = Lost([emission(1, 0, 0)], [replace(emission(2, 0, 0), num_cached_tokens=9)], [LAST])
    call = replace(CALL, timeout_s=6.0)
    attempts = Resumption(lost, call, max_resumes=2, on_attempt=told.append, on_resume=note_loss)
    batches = [batch async for batch in attempts.tokens()]
    assert [(batch.token_ids, batch.num_cached_tokens) for batch in batches] == [((1,), 3), ((2,), 3), ((3,), 3)]
    assert [call.timeout_s for call in lost.calls] == [6.0, 2.0, 0.0]
    ids = [call.request_id for call in lost.calls]
    assert told == [ids[0], "lost", ids[1], "lost", ids[2]]
    assert len({*ids, CALL.request_id}) == 4


async def test_so_many_replicas_may_be_lost_and_no_more() -> None:
    lost = Lost([emission(1, 0, 0)], [emission(2, 0, 0)], [LAST])
    batches = Resumption(lost, CALL, max_resumes=1).tokens()
    assert [(await anext(batches)).token_ids for _ in range(2)] == [(1,), (2,)]
    with pytest.raises(ReplicaLostError):
        await anext(batches)


@pytest.mark.parametrize("begun", [[], [emission(1, 0, 0)]])
async def test_a_successor_is_waited_for_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, begun: list[Emission]
) -> None:
    now_s = [0.0]

    def note(_: RequestId) -> None:
        now_s[0] += resumption.MAX_WAIT_S / 2

    monkeypatch.setattr(resumption, "_POLL_S", 0.0)
    monkeypatch.setattr(resumption.time, "monotonic", lambda: now_s[0])
    away = [UnavailableError("No replica.", retry_after_s=1.0)] * 9
    lost = Lost(begun, *away[:2], [LAST])
    batches = [batch async for batch in Resumption(lost, CALL, max_resumes=1, on_attempt=note).tokens()]
    assert batches[-1].token_ids == LAST.token_ids
    lost = Lost(begun, *away, [LAST])
    with pytest.raises(UnavailableError):
        [batch async for batch in Resumption(lost, CALL, max_resumes=1, on_attempt=note).tokens()]
    assert len(lost.calls) == 4


async def test_what_a_prompt_scored_is_told_once_and_what_was_cached_each_time() -> None:
    scored = (TokenLogprobs(-0.5),)
    for first in ([], [replace(emission(1, 0, 0), prompt_logprobs=scored)]):
        again = [replace(emission(2, 0, 0), prompt_logprobs=scored), replace(LAST, num_cached_tokens=0)]
        batches = [batch async for batch in Resumption(Lost(first, again), CALL, max_resumes=1).tokens()]
        assert [batch.prompt_logprobs for batch in batches if batch.prompt_logprobs] == [scored]
    (first, last) = [
        batch
        async for batch in Resumption(
            Lost([emission(1, 0, 0), replace(LAST, num_cached_tokens=0)]), CALL, max_resumes=0
        ).tokens()
    ]
    assert first.num_cached_tokens == last.num_cached_tokens == 3


async def test_what_was_cached_is_told_of_the_replica_that_gave_the_first_token() -> None:
    """A request whose replica was lost before its first token was billed as if nothing had been cached."""
    lost = Lost([], [emission(1, 0, 0)], [replace(LAST, num_cached_tokens=9)])
    batches = [batch async for batch in Resumption(lost, CALL, max_resumes=2).tokens()]
    assert [batch.num_cached_tokens for batch in batches] == [3, 3]


@pytest.mark.parametrize("refusal", [full("queue_full"), UnavailableError("No replica.", retry_after_s=1.0)])
async def test_a_call_with_prior_output_waits_for_room_and_keeps_that_output(
    monkeypatch: pytest.MonkeyPatch, refusal: OverloadError
) -> None:
    """An expansion of a beam that found no room took the whole search along."""
    monkeypatch.setattr(resumption, "_POLL_S", 0.0)
    lost = Lost(refusal, [], [LAST])
    call = replace(CALL, prior_output_ids=pack_ids([7, 8]))
    batches = [batch async for batch in Resumption(lost, call, max_resumes=2).tokens()]
    assert [batch.token_ids for batch in batches] == [LAST.token_ids]
    assert [call.prior_output_ids for call in lost.calls] == [pack_ids([7, 8])] * 3
