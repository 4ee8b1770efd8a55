from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from app.translation.blocks import BlockReader
from deployments.answer_events import EndReason, Finished, GenerationEvent, Started, TextDelta
from deployments.gateway import answering
from deployments.generation import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from deployments.stream.harmony import MARKS
from engine.errors import RequestError
from engine.request import Emission, FinishReason, RequestId, TokenLogprobs
from tests.deployments.conftest import OpenGateway, Serving
from tests.deployments.in_process import Method, ask, events_of, text_of
from tests.deployments.tiny_models import write_tokenizer
from tests.deployments.trained_tokenizers import metaspace

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SAID = ChatMessage(role="assistant", content="the dog")


@pytest.mark.parametrize(
    ("prompt", "is_continued"),
    [
        (TextPrompt(text="the dog"), True),
        (TokenPrompt(token_ids=(metaspace().token_to_id("o"),)), True),
        (TokenPrompt(token_ids=(metaspace().token_to_id("<s>"),)), False),
        (ChatPrompt(messages=(SAID,), continues_final_message=True), True),
        (ChatPrompt(messages=(SAID,)), False),
    ],
)
async def test_only_the_first_text_of_all_loses_its_space(
    gateway: OpenGateway, serving: Serving, tmp_path: Path, prompt: Prompt, is_continued: bool
) -> None:
    """Llama 2 and Mistral have such decoders, which took a space off the indentation of code that was continued."""
    tokenizer = metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    space = tokenizer.token_to_id("▁")
    asked = ask(prompt, max_tokens=1, params={"logit_bias": ((space, 100.0),)})
    model = replace(serving.model, tokenizer_path=str(tmp_path))
    assert text_of(await events_of(await gateway(model=model), asked)) == " " * is_continued


async def test_an_empty_text_has_no_tokens_and_no_answer(gateway: OpenGateway) -> None:
    opened = await gateway()
    assert (await opened.tokenize("chat", TextPrompt(text=""), with_texts=True)).token_ids == ()
    with pytest.raises(RequestError, match="'prompt' has no tokens") as refused:
        await events_of(opened, ask(TextPrompt(text="")))
    assert refused.value.field == "prompt"


async def test_a_stop_string_ends_no_answer_of_fewer_tokens_than_were_asked_for(gateway: OpenGateway) -> None:
    opened = await gateway()
    text = text_of(await events_of(opened, ask()))
    stops = tuple(set(text))
    ends = [(await events_of(opened, ask(stop=stops, params={"min_tokens": min_tokens})))[-1] for min_tokens in (0, 9)]
    assert all(isinstance(end, Finished) and end.reason is EndReason.STOP for end in ends)
    assert [end.num_completion_tokens > 9 for end in ends if isinstance(end, Finished)] == [False, True]


async def test_an_answer_tells_the_stop_token_of_the_request_that_ended_it(gateway: OpenGateway) -> None:
    opened = await gateway()
    for stop_ids, told in (((9,), 9), ((), None)):
        params = {"logit_bias": ((9, 100.0),), "stop_token_ids": stop_ids}
        end = (await events_of(opened, ask(max_tokens=3, params=params)))[-1]
        assert isinstance(end, Finished)
        assert (end.stop, end.stop_id) == (None, told)


class Scripted:
    """In the place of a `Resumption`: an answer in batches of these sizes."""

    def __init__(self, token_ids: Sequence[int], sizes: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._bounds = [*accumulate(sizes, initial=0)]

    def __call__(self, *_: object, **__: object) -> Scripted:
        return self

    async def tokens(self) -> AsyncGenerator[Emission, None]:
        for start, stop in pairwise(self._bounds):
            token_ids = tuple(self._token_ids[start:stop])
            yield Emission(
                request_id=RequestId("r"),
                token_ids=token_ids,
                finish_reason=FinishReason.STOP if stop == len(self._token_ids) else None,
                logprobs=tuple(TokenLogprobs(-float(place), (), 1) for place in range(start, stop)),
            )


def blocks_in(events: Sequence[GenerationEvent]) -> list[tuple[str, str, list[Any]]]:
    """Return the kind, the text and the log-probabilities of what an answer consists of, in its order."""
    reader = BlockReader()
    for event in events:
        if isinstance(event, TextDelta):
            list(reader.feed(event))
    return [(block.kind.name, block.text, [score.logprob for score in block.scores]) for block in reader.blocks]


async def test_thoughts_after_a_preamble_stay_after_it_whatever_comes_in_one_batch(
    gateway: OpenGateway, serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each batch the thoughts came first: in Responses and Messages they stood before, or in, the preamble."""
    size = write_tokenizer(tmp_path, marks=MARKS, template=TEMPLATE + "{# <|channel|> #}")
    opened = await gateway(model=replace(serving.model, tokenizer_path=str(tmp_path), vocab_size=size))
    answer = (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>So.<|return|>"
    )
    text = TextPrompt(text=answer, has_special_tokens=False)
    token_ids = (await opened.tokenize("chat", text, with_texts=True)).token_ids
    found = []
    for sizes in ([1] * len(token_ids), [len(token_ids)], [4, len(token_ids) - 4], [4, 30, len(token_ids) - 34]):
        monkeypatch.setattr(answering, "Resumption", Scripted(token_ids, sizes))
        found.append(blocks_in(await events_of(opened, ask())))
    parts = [("TEXT", "I look."), ("THOUGHTS", "Hm."), ("TEXT", "\n\nSo.")]
    assert [(kind, text) for kind, text, _ in found[0]] == parts
    assert found == [found[0]] * len(found)


async def test_a_call_that_is_canceled_on_its_replica_is_made_again(
    serving: Serving, gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve then raises what it raises where the caller cancels: the answer waited for tokens without end."""
    opened = await gateway()
    expected = text_of(await events_of(opened, ask()))
    replicas, num_canceled = serving.replicas, 0

    def canceled_once(method: Method) -> Method:
        def call(*arguments: Any) -> Any:
            nonlocal num_canceled
            if num_canceled:
                return method.remote(*arguments)
            num_canceled += 1
            return CanceledResponse()

        return Method(call)

    monkeypatch.setattr(replicas, "generate", canceled_once(replicas.generate))
    monkeypatch.setattr(replicas, "generate_stream", canceled_once(replicas.generate_stream))
    async with asyncio.timeout(60):
        assert text_of(await events_of(opened, ask())) == expected
    assert num_canceled == 1


class CanceledResponse:
    """A `DeploymentResponse` or `DeploymentResponseGenerator` of a call that is canceled on its replica."""

    def __await__(self) -> Any:
        raise asyncio.CancelledError
        yield

    def __aiter__(self) -> CanceledResponse:
        return self

    async def __anext__(self) -> Emission:
        raise asyncio.CancelledError

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("params", [{}, {"num_logprobs": 1, "num_prompt_logprobs": 1}])
async def test_beside_an_echo_alone_no_token_is_counted(gateway: OpenGateway, params: dict[str, Any]) -> None:
    """Usage in the answer said none, and the record and the limits one."""
    opened = await gateway()
    asked = ask(TextPrompt(text="the dog"), max_tokens=0, echoes=True, params=params)
    started, finished = await events_of(opened, asked)
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert (started.prompt_text, bool(started.prompt_scores)) == ("the dog", bool(params))
    assert (finished.reason, finished.num_completion_tokens) == (EndReason.LENGTH, 0)
    (timeline,) = await opened.own_timelines(asked.request_id)
    assert (timeline.num_tokens, timeline.outcome) == (0, "length")
