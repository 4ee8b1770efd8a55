from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.gateway.answer_log import AnswerLog
from deployments.generation import ChatPrompt, GenerationRequest, TextPrompt
from deployments.pooled import EmbeddingRequest, RerankRequest
from deployments.timeline import Timeline
from engine.errors import OverloadError
from engine.request import SamplingParams

REQUEST = GenerationRequest(
    request_id="r", model="chat", prompt=TextPrompt(text="Hi"), params=SamplingParams(max_tokens=1, seed=0)
)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OverloadError("full", retry_after_s=1.0), "OverloadError"),
        (KeyError("a mistake of ours"), "KeyError"),
        (GeneratorExit(), "cancelled"),
    ],
)
def test_an_answer_ends_as_what_ended_it_and_is_cancelled_only_by_who_left(error: BaseException, outcome: str) -> None:
    ended: list[Timeline] = []
    with pytest.raises(type(error)), AnswerLog(ended.append).answer(REQUEST, "chat"):
        raise error
    assert [timeline.outcome for timeline in ended] == [outcome]


@pytest.mark.parametrize(
    ("request_", "operation"),
    [
        (REQUEST, "text_completion"),
        (replace(REQUEST, prompt=ChatPrompt(messages=())), "chat"),
        (EmbeddingRequest(request_id="r", model="m", inputs=()), "embeddings"),
        (RerankRequest(request_id="r", model="m", pairs=()), "rerank"),
    ],
)
def test_an_answer_is_called_what_was_asked_for(
    request_: GenerationRequest | EmbeddingRequest | RerankRequest, operation: str
) -> None:
    """Every span was a chat's."""
    with AnswerLog(lambda _: None).answer(request_, "m") as recorder:
        assert recorder.timeline.operation == operation
