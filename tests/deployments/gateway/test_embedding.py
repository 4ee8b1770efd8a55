"""Vectors of the gateway against transformers, and what becomes of requests that cannot have one."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from adapters.identity import AdapterDigest, AdapterRef
from deployments.config import SafetyConfig
from deployments.gateway import embedding
from deployments.gateway.embedding import scaled
from deployments.gateway.served_model import ServedModel
from deployments.generation import TextPrompt, TokenPrompt
from deployments.generation_calls import GenerationCall
from deployments.pooled import EmbeddingRequest
from engine.errors import OverloadError, RequestError
from engine.request import Pooling
from tests.deployments.conftest import OpenGateway, Serving
from tests.deployments.in_process import Judge
from tests.deployments.tiny_models import CONTEXT
from tests.parity.peft_adapters import save_classifier, scores_of

TEXTS = ("Where am I?", "Return the current working directory.", "x")
IDS = (7, 8, 9, 10)


def asked(*inputs: str | tuple[int, ...], **changes: Any) -> EmbeddingRequest:
    prompts = tuple(TextPrompt(text=i) if isinstance(i, str) else TokenPrompt(token_ids=i) for i in inputs)
    return EmbeddingRequest(**{"request_id": "r.1", "model": "chat", "inputs": prompts} | changes)


def numbers(vector: bytes) -> np.ndarray:
    return np.frombuffer(vector, "<f4")


@cache
def theirs(folder: str) -> tuple[Any, Any]:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def expected(folder: str, item: str | tuple[int, ...], pooling: Pooling = Pooling.LAST) -> np.ndarray:
    model, tokenizer = theirs(folder)
    ids = torch.tensor([tokenizer(item).input_ids if isinstance(item, str) else item])
    states = model(ids).last_hidden_state[0]
    pooled = states.mean(0) if pooling is Pooling.MEAN else states[-1]
    return np.asarray(pooled / pooled.norm())


@pytest.mark.parametrize("pooling", [None, Pooling.LAST, Pooling.MEAN])
async def test_vectors_are_those_of_transformers_in_order_and_of_unit_length(
    gateway: OpenGateway, serving: Serving, pooling: Pooling | None
) -> None:
    opened = await gateway()
    items = (*TEXTS, IDS)
    found = await opened.embed(asked(*items, pooling=pooling))
    for vector, item in zip(found.vectors, items, strict=True):
        wanted = expected(serving.model.tokenizer_path, item, pooling or Pooling.LAST)
        np.testing.assert_allclose(numbers(vector), wanted, atol=1e-4)
    (timeline,) = await opened.own_timelines("r")
    assert (timeline.outcome, timeline.num_prompt_tokens) == ("stop", found.num_prompt_tokens)
    assert [stage.name for stage in timeline.stages] == ["tokenize", "vectors"]
    await serving.replicas.until_idle()


async def test_a_text_ends_as_its_tokenizer_s_makers_ended_it(
    gateway: OpenGateway, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.tokenizer.text_codec.omitted_end", lambda folder, loaded: 1)
    opened = await gateway()
    path = serving.model.tokenizer_path
    ids = (*theirs(path)[1](TEXTS[0]).input_ids, 1)
    found = await opened.embed(asked(TEXTS[0], IDS))
    for vector, wanted in zip(found.vectors, (ids, IDS), strict=True):
        np.testing.assert_allclose(numbers(vector), expected(path, wanted), atol=1e-4)
    assert found.num_prompt_tokens == len(ids) + len(IDS)


async def test_a_model_has_a_pooling_of_its_own(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway(model=replace(serving.model, pooling="mean"))
    (vector,) = (await opened.embed(asked(IDS))).vectors
    wanted = expected(serving.model.tokenizer_path, IDS, Pooling.MEAN)
    np.testing.assert_allclose(numbers(vector), wanted, atol=1e-4)


def test_a_vector_is_cut_before_it_is_scaled() -> None:
    raw = np.array([3, 4, 12], "<f4").tobytes()
    np.testing.assert_allclose(numbers(scaled(raw, 2, True)), [0.6, 0.8])
    np.testing.assert_allclose(numbers(scaled(raw, 2, False)), [3, 4])
    np.testing.assert_allclose(numbers(scaled(raw, None, True)), np.array([3, 4, 12]) / 13, rtol=1e-6)
    assert numbers(scaled(bytes(8), None, True)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("request_", "field", "code"),
    [
        (asked("x", model="nobody"), "model", "model_not_found"),
        (asked("x", dimensions=33), "dimensions", None),
        (asked("x", "y " * CONTEXT), "input[1]", "context_length_exceeded"),
        (asked("x", pooling=Pooling.CLASS), "model", None),
        (asked(""), "input", None),
        (asked((1, 300)), "input", None),
        (asked("x", "\ud800"), "input[1]", None),
    ],
)
async def test_what_cannot_be_served_names_its_field(
    gateway: OpenGateway, serving: Serving, request_: EmbeddingRequest, field: str, code: str | None
) -> None:
    with pytest.raises(RequestError) as refused:
        await (await gateway()).embed(request_)
    assert (refused.value.field, refused.value.code) == (field, code)
    assert f"'{field}'" in refused.value.message or field == "model"
    assert serving.replicas.calls == []


async def test_a_vector_may_be_asked_for_in_all_its_dimensions_or_fewer(gateway: OpenGateway) -> None:
    opened = await gateway()
    for dimensions in (1, 32):
        (vector,) = (await opened.embed(asked("x", dimensions=dimensions))).vectors
        assert len(vector) == 4 * dimensions


async def test_scores_of_a_classifier_are_those_of_peft_and_its_vectors_are_vectors(
    gateway: OpenGateway, serving: Serving, tmp_path: Path
) -> None:
    path = serving.model.tokenizer_path
    ref, model = save_classifier(path, tmp_path / "mood", 3)
    judge = Judge("bad")
    safety = SafetyConfig(model_path="unused", screen_embeddings=True)
    opened = await gateway(judge, model=replace(serving.model, adapters=(ref,)), safety=safety)
    items = (*TEXTS, IDS)
    found = await opened.embed(asked(*items, model="mood", pooling=Pooling.CLASS, normalizes=False))
    for scores, item in zip(found.vectors, items, strict=True):
        ids = theirs(path)[1](item).input_ids if isinstance(item, str) else item
        np.testing.assert_allclose(numbers(scores), scores_of(model, ids), atol=1e-4)
    (timeline,) = await opened.own_timelines("r")
    assert (timeline.outcome, timeline.num_prompt_tokens) == ("stop", found.num_prompt_tokens)
    (vector,) = (await opened.embed(asked(IDS, model="mood"))).vectors
    assert len(vector) == 4 * 32
    with pytest.raises(RequestError) as refused:
        await opened.embed(asked("bad", model="mood", pooling=Pooling.CLASS))
    assert refused.value.code == "content_policy_violation"
    await serving.replicas.until_idle()


async def test_an_adapter_without_a_classifier_is_refused_before_the_engine(
    gateway: OpenGateway, serving: Serving
) -> None:
    ref = AdapterRef(name="sql", digest=AdapterDigest("d"), path="/")
    opened = await gateway(model=replace(serving.model, adapters=(ref,)))
    with pytest.raises(RequestError, match="'model' has no classifier") as refused:
        await opened.embed(asked(IDS, model="sql", pooling=Pooling.CLASS))
    assert refused.value.field == "model"
    assert serving.replicas.calls == []


async def test_an_input_whose_replica_dies_goes_to_another(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway()
    serving.replicas.engine.hold_after_steps = 1
    first = await opened.embed(asked(IDS))
    # The engine stands still: this one waits where it is until the replica is killed.
    task = asyncio.ensure_future(opened.embed(asked(IDS)))
    while len(serving.replicas.calls) < 2:
        await asyncio.sleep(0.001)
    await serving.replicas.kill()
    assert (await task).vectors == first.vectors
    assert len(serving.replicas.calls) == 3


async def test_a_request_with_more_inputs_than_a_replica_queues_is_served_if_they_alone_fill_it(
    gateway: OpenGateway, serving: Serving
) -> None:
    """An idle server refused it, whenever it came again."""
    opened = await gateway()
    inputs = tuple((*IDS, number) for number in range(60))
    found = await opened.embed(asked(*inputs))
    assert len(serving.replicas.calls) > len(inputs)
    for vector, ids in zip(found.vectors, inputs, strict=True):
        np.testing.assert_allclose(numbers(vector), expected(serving.model.tokenizer_path, ids), atol=1e-4)
    await serving.replicas.until_idle()


async def test_a_request_asks_for_no_more_at_once_than_its_share(
    gateway: OpenGateway, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "MAX_CONCURRENT_INPUTS", 2)
    running, most = Counter[str](), Counter[str]()

    def count(owner: object, name: str) -> None:
        method = getattr(owner, name)

        async def call(*args: object) -> object:
            running[name] += 1
            most[name] = max(most[name], running[name])
            await asyncio.sleep(0)
            found = await method(*args)
            running[name] -= 1
            return found

        monkeypatch.setattr(owner, name, call)

    def note(call: GenerationCall) -> Any:
        generation = open_now(call)
        most["open"] = max(most["open"], len(server._generations))
        return generation

    count(ServedModel, "encode")
    server, open_now = serving.replicas.server, serving.replicas.server._open
    monkeypatch.setattr(server, "_open", note)
    await (await gateway()).embed(asked(*TEXTS, "y", "z"))
    assert most == {"encode": 2, "open": 2}


@pytest.mark.parametrize(("said", "tenant"), [({"tenant": "blue"}, "blue"), ({}, "s")])
async def test_what_a_request_says_reaches_the_engine(
    gateway: OpenGateway, serving: Serving, said: dict[str, Any], tenant: str
) -> None:
    ref = AdapterRef(name="sql", digest=AdapterDigest("d"), path="/")
    opened = await gateway(model=replace(serving.model, adapters=(ref,)))
    serving.replicas.refusal = RequestError("enough")
    with pytest.raises(RequestError, match="enough"):
        await opened.embed(asked(IDS, model="sql", salt="s", priority=3, pooling=Pooling.MEAN, timeout_s=60.0, **said))
    (call,) = serving.replicas.calls
    assert (call.adapter, call.tenant, call.salt, call.priority) == (ref, tenant, "s", 3)
    assert (call.pooling, call.params.max_tokens) == (Pooling.MEAN, 0)
    assert call.timeout_s is not None
    assert 0 < call.timeout_s <= 60


async def test_a_request_is_refused_if_others_leave_none_of_its_inputs_room(
    gateway: OpenGateway, serving: Serving
) -> None:
    opened = await gateway()
    serving.replicas.engine.hold_after_steps = 0
    others = asyncio.ensure_future(opened.embed(asked(*((*IDS, number) for number in range(60)))))
    while not serving.replicas.engine.snapshot().num_waiting:
        await asyncio.sleep(0.001)
    while len(serving.replicas.calls) < 60:
        await asyncio.sleep(0.001)
    with pytest.raises(OverloadError):
        await opened.embed(asked(IDS, (*IDS, 1)))
    others.cancel()
    await serving.replicas.until_idle()


async def test_a_deadline_frees_what_is_late(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway()
    serving.replicas.engine.hold_after_steps = 1
    await opened.embed(asked(IDS))
    with pytest.raises(TimeoutError):
        await opened.embed(asked(*TEXTS, timeout_s=0.05))
    await serving.replicas.until_idle()


async def test_inputs_are_judged_where_the_configuration_says_so(gateway: OpenGateway, serving: Serving) -> None:
    judge = Judge("bad")
    opened = await gateway(judge)
    assert len((await opened.embed(asked("bad"))).vectors) == 1
    assert judge.texts == []
    opened = await gateway(judge, safety=SafetyConfig(model_path="unused", screen_embeddings=True))
    as_ids = tuple(theirs(serving.model.tokenizer_path)[1]("bad", add_special_tokens=False).input_ids)
    for bad in ("bad", as_ids):
        with pytest.raises(RequestError) as refused:
            await opened.embed(asked("fine", bad))
        assert (refused.value.field, refused.value.code) == ("input[1]", "content_policy_violation")
    assert judge.texts == ["fine", "bad"] * 2
    (timeline, _) = await opened.own_timelines("r")
    assert [stage.name for stage in timeline.stages] == ["tokenize", "safety"]
