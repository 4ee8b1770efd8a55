from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from adapters.identity import AdapterDigest, AdapterRef
from deployments.answer_events import EndReason, Finished, GenerationEvent, Started, TextDelta
from deployments.config import ModelConfig
from deployments.errors import ReplicaLostError, UnavailableError
from deployments.exposition import join
from deployments.gateway.gateway import Gateway
from deployments.generation import Grammar, TextPrompt, TokenPrompt
from deployments.generation_calls import unpack_ids
from deployments.handle_calls import reached
from deployments.room import NUM_PLACES
from deployments.siblings import Siblings
from deployments.slo import Slo
from deployments.tokenizer.token_pieces import TokenPieces
from deployments.tokenizer.tokenizer import LocalTokenizer
from engine.errors import EngineError, OverloadError, RequestError
from engine.request import DryPenalty, LzPenalty
from tests.deployments.conftest import OpenGateway, Serving
from tests.deployments.in_process import ask, events_of, text_of
from tests.deployments.tiny_models import CONTEXT
from tests.engine.simulated import ExactCosts


async def test_an_answer_starts_then_brings_text_then_ends(gateway: OpenGateway) -> None:
    events = await events_of(await gateway(), ask(max_tokens=12))
    assert isinstance(events[0], Started)
    assert all(isinstance(event, TextDelta) and event.text for event in events[1:-1])
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.reason is EndReason.LENGTH
    assert end.num_completion_tokens == 12
    assert end.num_prompt_tokens == events[0].num_prompt_tokens > 0


async def test_many_answers_at_once_are_those_of_each_alone(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway()
    requests = [ask(f"Question {n}", request_id=f"r{n}", max_tokens=5 + n) for n in range(12)]
    alone = [text_of(await events_of(opened, request)) for request in requests]
    together = await asyncio.gather(*(events_of(opened, request) for request in requests))
    assert list(map(text_of, together)) == alone
    await serving.replicas.until_idle()


async def test_what_a_request_leaves_open_is_as_the_model_s_makers_say(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway(model=replace(serving.model, sampling={"temperature": 0.5, "top_k": 3}))
    await events_of(opened, ask(open_params=frozenset({"top_k", "min_p"}), params={"temperature": 2.0}))
    (call,) = serving.replicas.calls
    assert (call.params.temperature, call.params.top_k, call.params.min_p) == (2.0, 3, 0.0)


async def test_a_prompt_with_a_token_that_the_model_lacks_is_refused_by_its_own_field(
    gateway: OpenGateway, serving: Serving
) -> None:
    """Tokenizers of fine-tuned checkpoints may have a few tokens more than the embedding."""
    opened = await gateway(model=replace(serving.model, vocab_size=100))
    for prompt, field in (("Where am I?", "messages"), (TextPrompt(text="Where am I?"), "prompt")):
        with pytest.raises(
            RequestError, match=rf"'{field}' has the token id \d+; those of this model are from 0 to 99"
        ) as e:
            await events_of(opened, ask(prompt))
        assert e.value.field == field


async def test_an_answer_without_a_bound_fills_the_context(gateway: OpenGateway) -> None:
    end = (await events_of(await gateway(), ask(max_tokens=None)))[-1]
    assert isinstance(end, Finished)
    assert end.num_prompt_tokens + end.num_completion_tokens == CONTEXT


async def test_a_dead_replica_s_stream_goes_on_elsewhere_as_if_nothing_had_been(
    gateway: OpenGateway, serving: Serving
) -> None:
    opened = await gateway()
    dry, lz = DryPenalty(multiplier=0.5, allowed_length=1), LzPenalty(strength=0.1)
    params = {"temperature": 1.0, "seed": 7, "dry": dry, "lz": lz}
    request = ask(max_tokens=120, params=params, dry_breakers=("\n", ":"))
    expected = text_of(await events_of(opened, request))
    serving.replicas.calls.clear()
    serving.replicas.engine.hold_after_steps = 130
    events, is_killed = [], False
    async with aclosing(opened.generate(request)) as stream:
        async for event in stream:
            events.append(event)
            # At the first piece: on a busy machine it may have all the tokens before the engine stands still.
            if isinstance(event, TextDelta) and not is_killed:
                is_killed = True
                await serving.replicas.kill()
    assert text_of(events) == expected
    assert isinstance(events[-1], Finished)
    assert events[-1].num_completion_tokens == 120
    first, second = serving.replicas.calls
    assert unpack_ids(second.prior_output_ids)
    assert first.params == second.params
    assert first.params.dry is not None
    assert first.params.dry.breakers
    assert first.request_id != second.request_id


async def test_a_replica_of_another_tokenizer_refuses_what_it_would_misread(
    gateway: OpenGateway, tiny_model: ModelConfig
) -> None:
    """In a rollout of another tokenizer, clients got garbage with status 200."""
    opened = await gateway(model=replace(tiny_model, tokenizer_digest="another"))
    with pytest.raises(UnavailableError, match="is being replaced"):
        await events_of(opened, ask())


async def test_a_stream_whose_replicas_all_die_ends_with_an_error(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway(max_resumes=0)
    serving.replicas.engine.hold_after_steps = 10

    async def read_and_kill() -> None:
        async for event in opened.generate(ask(max_tokens=120)):
            if isinstance(event, TextDelta):
                await serving.replicas.kill()

    with pytest.raises(ReplicaLostError):
        await read_and_kill()


async def held_answer(opened: Gateway, serving: Serving) -> tuple[str, asyncio.Task[list[GenerationEvent]]]:
    """Return an answer's text, and its request made again of a replica that stands still before the first step."""
    request = ask(max_tokens=20)
    expected = text_of(await events_of(opened, request))
    serving.replicas.calls.clear()
    serving.replicas.engine.hold_after_steps = 0
    return expected, asyncio.create_task(events_of(opened, request))


async def test_a_replica_that_dies_with_the_prompt_in_hand_costs_no_token(
    gateway: OpenGateway, serving: Serving
) -> None:
    opened = await gateway()
    expected, answer = await held_answer(opened, serving)
    while not serving.replicas.engine.snapshot().num_waiting + serving.replicas.engine.snapshot().num_running:
        await asyncio.sleep(0.01)
    await serving.replicas.kill()
    events = await answer
    assert text_of(events) == expected
    assert len(serving.replicas.calls) == 2


async def test_what_waits_in_a_replica_whose_machine_is_gone_goes_on_elsewhere(
    gateway: OpenGateway, serving: Serving
) -> None:
    """Only what had output did: Serve's call would have failed after seven minutes."""
    if serving.channel.transport == "handle":
        pytest.skip("calls by a handle end with Serve's connection")
    opened = await gateway()
    expected, answer = await held_answer(opened, serving)
    assert opened._listener is not None
    while not opened._listener._feeders:
        await asyncio.sleep(0.01)
    await serving.replicas.server._dialer.close()
    assert text_of(await answer) == expected
    assert len(serving.replicas.calls) == 2


async def test_a_call_that_serve_delivers_twice_is_computed_once_more_and_leaves_nothing_open(
    gateway: OpenGateway, serving: Serving
) -> None:
    """The client was told of an id that it had not chosen, and the first call stayed open for ever."""
    opened = await gateway()
    request = ask(max_tokens=60)
    expected = text_of(await events_of(opened, request))
    serving.replicas.delivers_twice = True
    assert text_of(await events_of(opened, request)) == expected
    await serving.replicas.until_idle()
    async with asyncio.timeout(10):
        while serving.replicas._open or serving.replicas.server._generations:
            await asyncio.sleep(0.01)


async def test_a_server_that_stops_ends_with_an_error_what_it_cannot_finish(
    gateway: OpenGateway, serving: Serving
) -> None:
    if serving.channel.transport == "handle":
        pytest.skip("what comes by a handle is ended by Serve")
    opened = await gateway()
    serving.replicas.engine.hold_after_steps = 10
    stopping = []

    async def read_and_stop() -> None:
        async for event in opened.generate(ask(max_tokens=120)):
            if isinstance(event, TextDelta):
                stopping.append(asyncio.create_task(opened.drain(0.0)))

    with pytest.raises(OverloadError, match="stopping"):
        await read_and_stop()
    await asyncio.gather(*stopping)
    await serving.replicas.until_idle()
    with pytest.raises(OverloadError, match="stopping"):
        await events_of(opened, ask())


async def test_a_stop_string_ends_the_answer_before_it_and_frees_the_engine(
    gateway: OpenGateway, serving: Serving
) -> None:
    opened = await gateway()
    whole = text_of(await events_of(opened, ask(max_tokens=100)))
    stop = next(whole[i : i + 2] for i in range(30, 90) if whole[i : i + 2].isascii())
    events = await events_of(opened, ask(max_tokens=100, stop=(stop,)))
    assert text_of(events) == whole[: whole.index(stop)]
    kept = await events_of(opened, ask(max_tokens=100, stop=(stop,), keeps_stop=True))
    assert text_of(kept) == whole[: whole.index(stop)] + stop
    assert kept[-1] == events[-1]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is EndReason.STOP
    assert events[-1].num_completion_tokens < 100
    await serving.replicas.until_idle()


@pytest.mark.parametrize("stop", ["fo", "second", "its last word", "nowhere"])
async def test_what_a_grammar_forces_is_cut_and_counted_as_what_is_drawn(
    gateway: OpenGateway, serving: Serving, stop: str
) -> None:
    """Log-probabilities have every token drawn; the others come at once, and the stop string lies among them."""
    opened, text = await gateway(), "[ab]forced from its second letter to its last word"
    grammar = Grammar(source=LLMatcher.grammar_from_regex(text), field="structured_outputs")
    fields = {"grammar": grammar, "stop": (stop,), "max_tokens": 60}
    requests = [ask(params={"ignore_eos": False, "num_logprobs": asked}, **fields) for asked in (None, 0)]
    (*_, jumped), (*_, drawn) = told = [await events_of(opened, request) for request in requests]
    assert jumped == drawn
    assert text_of(told[0]) == text_of(told[1]) == text_of(told[0])[0] + text[4:].split(stop)[0]
    assert isinstance(jumped, Finished)
    assert jumped.stop == (None if stop == "nowhere" else stop)
    assert serving.replicas.engine.snapshot().counters.forced_tokens > 5
    await serving.replicas.until_idle()


async def test_a_stop_token_is_counted_and_not_shown(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway()
    await events_of(opened, ask(max_tokens=1))
    codec = opened._served["chat"].codec.pieces
    long = await events_of(opened, ask(max_tokens=40))
    ids = await _ids_of(opened, serving)
    stop_id = ids[10]
    events = await events_of(opened, ask(max_tokens=40, params={"stop_token_ids": (stop_id,)}))
    cut = ids.index(stop_id)
    assert text_of(events) == codec.decode(ids[:cut])
    kept = await events_of(opened, ask(max_tokens=40, params={"stop_token_ids": (stop_id,)}, keeps_stop=True))
    assert text_of(kept) == codec.decode(ids[: cut + 1])
    assert kept[-1] == events[-1]
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, events[-1].num_completion_tokens) == (EndReason.STOP, cut + 1)
    assert text_of(long).startswith(text_of(events)[:-1])


async def test_a_text_completion_tells_the_score_of_its_end_and_a_chat_does_not(
    gateway: OpenGateway, serving: Serving
) -> None:
    opened = await gateway()
    ids = await _ids_of(opened, serving)
    prompt = TokenPrompt(token_ids=tuple(unpack_ids(serving.replicas.calls[-1].prompt_ids)))
    cut = ids.index(ids[10])
    params = {"stop_token_ids": (ids[10],), "num_logprobs": 1}
    for asked, told in ((ask(max_tokens=40, params=params), cut), (ask(prompt, max_tokens=40, params=params), cut + 1)):
        events = await events_of(opened, asked)
        scores = [score for event in events if isinstance(event, TextDelta) for score in event.scores]
        assert [score.token_id for score in scores] == ids[:told]
        assert text_of(events) == opened._served["chat"].codec.pieces.decode(ids[:cut])


async def _ids_of(opened: Gateway, serving: Serving) -> list[int]:
    """The tokens of the usual answer, as a source brings them."""
    serving.replicas.calls.clear()
    await events_of(opened, ask(max_tokens=40))
    call = serving.replicas.calls[-1]
    return [i async for batch in opened._served["chat"].source.tokens(call) for i in batch.token_ids]


async def test_a_client_that_leaves_frees_its_request(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway()
    serving.replicas.engine.hold_after_steps = 20
    async with aclosing(opened.generate(ask(max_tokens=None))) as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                break
    await serving.replicas.until_idle()
    assert serving.replicas.engine.snapshot().counters.generation_tokens <= 21


async def test_a_client_that_leaves_before_the_first_token_frees_its_request(
    gateway: OpenGateway, serving: Serving
) -> None:
    opened = await gateway()
    serving.replicas.engine.hold_after_steps = 0
    task = asyncio.create_task(events_of(opened, ask(max_tokens=None)))
    while not serving.replicas.calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await serving.replicas.until_idle()


@pytest.mark.parametrize(
    ("changes", "field", "code", "said"),
    [
        ({"model": "other"}, "model", "model_not_found", "other"),
        ({"text": TokenPrompt(token_ids=(1, 289))}, "prompt", None, "288"),
        ({"text": TokenPrompt(token_ids=(-1,))}, "prompt", None, "0 to 288"),
        ({"text": TokenPrompt(token_ids=())}, "prompt", None, "at least 1"),
        ({"text": TextPrompt(text="x" * 300)}, "prompt", "context_length_exceeded", "256"),
        ({"max_tokens": 255}, "messages", "context_length_exceeded", "256"),
        ({"max_tokens": 256}, "max_tokens", "context_length_exceeded", "256"),
        ({"params": {"stop_token_ids": (289,)}}, "stop_token_ids", None, "0 to 288"),
    ],
)
async def test_what_can_never_be_served_is_refused_by_field_and_bound(
    gateway: OpenGateway, serving: Serving, changes: dict[str, Any], field: str, code: str | None, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        await events_of(await gateway(), ask(**changes))
    assert (caught.value.field, caught.value.code) == (field, code)
    assert serving.replicas.calls == []


async def test_over_the_queue_s_bound_a_request_is_told_when_to_come_back(
    gateway: OpenGateway, serving: Serving
) -> None:
    opened = await gateway()
    answers = await asyncio.gather(
        *(events_of(opened, ask(request_id=f"r{n}", max_tokens=60)) for n in range(40)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, OverloadError)]
    assert refused
    assert all(error.retry_after_s > 0 for error in refused)
    assert all(isinstance(answer, list | OverloadError) for answer in answers)
    await serving.replicas.until_idle()


async def test_a_request_with_more_prompts_than_a_replica_queues_is_answered_if_they_alone_fill_it(
    gateway: OpenGateway, serving: Serving
) -> None:
    """An idle server refused it, whenever it came again."""
    opened = await gateway()
    single = [ask(f"Question {number}", request_id=f"r{number}") for number in range(60)]
    expected = [text_of(await events_of(opened, request)) for request in single]
    siblings = Siblings()
    joined = [replace(request, siblings=siblings) for request in single]
    found = await asyncio.gather(*(events_of(opened, request) for request in joined))
    assert len(serving.replicas.calls) > 2 * len(single)
    assert list(map(text_of, found)) == expected
    await serving.replicas.until_idle()


async def test_an_answer_that_waits_for_its_siblings_ends_at_its_deadline(
    gateway: OpenGateway, serving: Serving
) -> None:
    opened = await gateway()
    siblings = Siblings()
    serving.replicas.engine.hold_after_steps = 0
    requests = [ask(f"Question {number}", request_id=f"r{number}", timeout_s=0.3) for number in range(60)]
    answers = (events_of(opened, replace(request, siblings=siblings)) for request in requests)
    found = await asyncio.gather(*answers, return_exceptions=True)
    assert {type(one) for one in found} == {TimeoutError}
    await serving.replicas.until_idle()


async def test_serve_s_back_pressure_is_overload(gateway: OpenGateway, serving: Serving) -> None:
    serving.replicas.refusal = BackPressureError(5, 4, retry_after_s=3)
    with pytest.raises(OverloadError) as caught:
        await events_of(await gateway(), ask())
    assert (caught.value.retry_after_s, caught.value.reason) == (3, "replicas_full")


async def test_a_deadline_ends_the_request_and_frees_the_engine(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway()
    serving.replicas.engine.hold_after_steps = 5
    with pytest.raises(TimeoutError):
        await events_of(opened, replace(ask(max_tokens=None), timeout_s=0.05))
    await serving.replicas.until_idle()


async def test_what_the_engine_says_of_a_refusal_arrives_as_it_was(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway(slo=Slo(e2e_s=1e-9))
    await events_of(opened, ask(max_tokens=3))
    # A step of a minute: no answer of 100 tokens is there in an hour.
    serving.replicas.engine.learn_costs(ExactCosts(base_s=60, row_s=0, token_s=0))
    with pytest.raises(OverloadError, match="its deadline is in") as refused:
        await events_of(opened, replace(ask(max_tokens=100), timeout_s=3600))
    assert (refused.value.reason, refused.value.retry_after_s) == ("deadline", 120)
    assert pickle.loads(pickle.dumps(refused.value)).reason == "deadline"
    told = join([opened._metrics.text("g")]).decode()
    for objective in ("e2e", "refused"):
        assert f'antiphon:slo_violated_total{{gateway="g",model_name="chat",objective="{objective}"}} 1.0' in told
    assert 'antiphon:request_failure_total{error="OverloadError",gateway="g",model_name="chat"} 1.0' in told


async def test_an_adapter_may_have_a_chat_template_of_its_own(
    gateway: OpenGateway, serving: Serving, tmp_path: Path
) -> None:
    refs = [AdapterRef(name=name, path=str(tmp_path), digest=AdapterDigest(name)) for name in ("own-1", "as", "own")]
    templates = {"own": "{{ messages[0].role }}", "own*": "{{ messages[0].content }}"}
    opened = await gateway(model=replace(serving.model, adapters=tuple(refs), template_by_pattern=templates))
    names = ("chat", "as", "own", "own-1")
    found = [await opened.tokenize(name, ask("Hi").prompt, with_texts=True) for name in names]
    assert found[0].token_ids == found[1].token_ids
    assert ["".join(each.texts or ()) for each in found[2:]] == ["user", "Hi"]
    with suppress(EngineError, RequestError):
        await events_of(opened, ask("Hi", model="own-1"))
    (call,) = serving.replicas.calls
    assert (unpack_ids(call.prompt_ids), call.adapter) == (found[3].token_ids, refs[0])


async def test_the_texts_of_tokens_are_made_beside_the_event_loop(
    gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For three million tokens, all streams of a gateway stood still for two seconds."""
    threads: list[int] = []
    spelling = TokenPieces.spelling

    def seen(pieces: TokenPieces, token_id: int) -> bytes:
        threads.append(threading.get_ident())
        return spelling(pieces, token_id)

    opened = await gateway()
    monkeypatch.setattr(TokenPieces, "spelling", seen)
    found = await opened.tokenize("chat", TextPrompt(text="Hi"), with_texts=True)
    assert "".join(found.texts or ()).endswith("Hi")
    assert threads
    assert threading.get_ident() not in threads


async def test_prompts_that_are_only_counted_take_turns_with_those_of_chats(
    gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that had hundreds counted at once made the chats of all others wait for the tokenizer's threads."""
    opened = await gateway()
    num_inside, most = 0, 0

    async def encode(*_args: object) -> Sequence[int]:
        nonlocal num_inside, most
        num_inside += 1
        most = max(most, num_inside)
        await asyncio.sleep(0)
        num_inside -= 1
        return (1,)

    monkeypatch.setattr(LocalTokenizer, "encode", encode)
    prompt = TextPrompt(text="Hi")
    await asyncio.gather(*(opened.tokenize("chat", prompt, with_texts=False, tenant="t") for _ in range(200)))
    assert most == NUM_PLACES


async def test_bases_are_listed_before_their_adapters(gateway: OpenGateway) -> None:
    opened = await gateway(created_s=5)
    (card,) = opened.models()
    assert (card.name, card.parent, card.created_s, card.max_model_len) == ("chat", None, 5, CONTEXT)


async def test_moderation_without_a_classifier_is_refused(gateway: OpenGateway) -> None:
    with pytest.raises(RequestError, match="no safety classifier"):
        await (await gateway()).moderate(["text"])


async def test_a_part_that_cannot_be_reached_is_unavailable() -> None:
    async def gone() -> None:
        raise ActorDiedError

    with pytest.raises(UnavailableError, match="tokenizer"):
        await reached("tokenizer", gone)


async def test_a_refusal_of_another_actor_keeps_its_fields() -> None:
    async def refuse() -> None:
        # Ray wraps the error in one of its own that is also an instance of it.
        error = RequestError("too long", field="input", code="c")
        raise RayTaskError("judge", "traceback", error).as_instanceof_cause()

    with pytest.raises(RequestError, match=r"^too long$") as refused:
        await reached("safety classifier", refuse)
    assert type(refused.value) is RequestError
    assert (refused.value.field, refused.value.code) == ("input", "c")
