from __future__ import annotations

from dataclasses import replace

import pytest

from adapters.identity import AdapterDigest, AdapterRef
from deployments.generation_calls import GenerationCall, pack_ids
from deployments.routing.asked import Asked, asked_of
from deployments.routing.report import adapter_mark
from engine.cache.prefix_index import landmark
from engine.request import RequestId, SamplingParams
from engine.scheduling.live_request import LiveRequest, rank_of

DIGEST = AdapterDigest("0123456789abcdef" * 4)


def call_of(prompt: range, prior: range = range(0), *, adapter: bool = True, salt: str = "tenant") -> GenerationCall:
    ref = AdapterRef(name="a", digest=DIGEST, path="/nowhere") if adapter else None
    return GenerationCall(
        request_id=RequestId("r"),
        prompt_ids=pack_ids(prompt),
        prior_output_ids=pack_ids(prior),
        params=SamplingParams(max_tokens=100),
        adapter=ref,
        salt=salt,
    )


@pytest.mark.parametrize("adapter_start", [0, 6, 16])
def test_the_names_are_the_engines_own(adapter_start: int) -> None:
    """Also over the border between a prompt and what another replica has generated of the answer."""
    call = replace(call_of(range(10), range(100, 107)), adapter_start=adapter_start)
    request = call.to_request(0.0)
    live = LiveRequest(
        request=request,
        rank=rank_of(0, tag=0, arrival=0),
        tag=0,
        queued_at_s=0,
        output_ids=list(request.prior_output_ids),
    )
    asked = asked_of(call, 4)
    assert asked.block_marks == [landmark(name) for name in live.names_of(4, 4)]
    assert (asked.num_tokens, asked.adapter) == (17, adapter_mark(DIGEST))
    assert asked.landmarks(2) == asked.block_marks[1::2]
    assert asked.landmarks(0) == ()


def test_a_prompt_is_cached_where_the_base_has_computed_what_precedes_the_adapter() -> None:
    activated = asked_of(replace(call_of(range(17)), adapter_start=9), 4).block_marks
    base = asked_of(call_of(range(17), adapter=False), 4).block_marks
    assert activated[:2] == base[:2]
    assert not {*activated[2:]} & {*base}


def test_adapter_and_salt_change_every_name() -> None:
    marks = [
        asked_of(call, 4).block_marks
        for call in (call_of(range(8)), call_of(range(8), adapter=False), call_of(range(8), salt="other"))
    ]
    assert len({mark for names in marks for mark in names}) == 3


def test_the_last_token_counts_as_new_and_a_short_prompt_has_a_key_of_its_own() -> None:
    assert len(asked_of(call_of(range(8)), 4).block_marks) == 1
    assert asked_of(call_of(range(8)), 0).block_marks == []
    scored = replace(call_of(range(8)), params=SamplingParams(max_tokens=1, num_prompt_logprobs=1))
    assert asked_of(scored, 4).block_marks == []
    assert Asked(request_id="a", num_tokens=1).key != Asked(request_id="b", num_tokens=1).key
    assert Asked(request_id="a", num_tokens=40, block_marks=[5, 6]).key == 6
    assert asked_of(call_of(range(9)), 4).key == asked_of(call_of(range(9)), 4).key
