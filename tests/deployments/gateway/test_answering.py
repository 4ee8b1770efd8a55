from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.gateway.gateway import Gateway
from deployments.generation import ChatMessage, ChatPrompt, EndReason, Finished, Prompt, TextPrompt, TokenPrompt
from engine.errors import RequestError
from tests.deployments.conftest import Serving
from tests.deployments.in_process import ask, events_of, text_of
from tests.deployments.trained_tokenizers import metaspace

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
OpenGateway = Callable[..., Awaitable[Gateway]]
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
