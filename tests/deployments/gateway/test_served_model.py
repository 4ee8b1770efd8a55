from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from deployments.answer_events import Finished
from deployments.config import ChannelConfig, ModelConfig
from deployments.generation_calls import unpack_ids
from deployments.tokenizer.text_codec import TextCodec
from engine.errors import RequestError
from engine.scheduling.step_costs import StepCosts
from tests.deployments.conftest import OpenGateway, Serving
from tests.deployments.in_process import SECRET, ask, events_of, text_of
from tests.deployments.tiny_models import CONTEXT


@pytest.fixture
async def drafting(tiny_model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serving]:
    """An engine that drafts, whatever that costs."""
    monkeypatch.setattr(StepCosts, "has_decode_steps", True)
    monkeypatch.setattr(StepCosts, "step_s", lambda self, num_rows: 0.01)
    monkeypatch.setattr(StepCosts, "draft_token_s", 0.0)
    model = replace(tiny_model, engine=replace(tiny_model.engine, num_speculative_tokens=8))
    serving = Serving(model, ChannelConfig(transport="tcp", secret=SECRET, host="127.0.0.1"))
    yield serving
    await serving.replicas.server.stop()


async def test_an_answer_that_was_predicted_is_the_same_and_tells_how_far_it_was(drafting: Serving) -> None:
    gateway = await drafting.gateway()
    # Tokens that are never joined, so that the text of an answer has the tokens of the answer.
    codec = TextCodec(drafting.model.tokenizer_path)
    letters = tuple(codec.encode_text("qxzj", has_special_tokens=False))
    plain = ask(max_tokens=60, params={"allowed_token_ids": letters, "temperature": 1.0, "seed": 5})
    expected = await events_of(gateway, plain)
    text = text_of(expected)
    wrong = text[:20] + ("x" if text[20] != "x" else "q") + text[21:]
    for prediction, is_right in ((text, True), (wrong, False)):
        events = await events_of(gateway, replace(plain, prediction=prediction))
        end = events[-1]
        assert text_of(events) == text
        assert isinstance(end, Finished)
        assert end.num_completion_tokens == 60
        # Of four letters a text is found again in wrong places too.
        assert (50 if is_right else 20) <= end.num_accepted < 60
        assert (end.num_rejected == 0) == is_right
    end = expected[-1]
    assert isinstance(end, Finished)
    assert (end.num_accepted, end.num_rejected) == (0, 0)


async def test_without_drafts_it_counts_nothing(gateway: OpenGateway, serving: Serving) -> None:
    end = (await events_of(await gateway(), ask(prediction="anything")))[-1]
    assert isinstance(end, Finished)
    assert (end.num_accepted, end.num_rejected) == (0, 0)
    (call,) = serving.replicas.calls
    assert unpack_ids(call.prediction_ids)


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("q x " * CONTEXT, rf"has \d+ tokens, but this model's maximum context length is {CONTEXT}"),
        ("x" * 1_000_001, "at most 1000000 characters"),
    ],
)
async def test_what_no_answer_could_be_is_refused_by_its_own_field(
    gateway: OpenGateway, serving: Serving, prediction: str, message: str
) -> None:
    opened = await gateway()
    with pytest.raises(RequestError, match=f"'prediction.content' .*{message}") as error:
        await events_of(opened, ask(prediction=prediction))
    assert error.value.field == "prediction.content"
    assert not serving.replicas.calls
