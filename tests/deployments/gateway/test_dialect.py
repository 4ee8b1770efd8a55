from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from deployments.config import ModelConfig
from deployments.gateway.dialect import dialect_of
from deployments.stream.harmony import MARKS
from deployments.stream.reasoning import THINK
from deployments.tokenizer.text_codec import TextCodec
from deployments.tools.formats import HERMES, JSON, LLAMA3
from deployments.tools.sample import CallSample
from engine.config import EngineConfig

CONFIG = ModelConfig(
    name="m",
    engine=EngineConfig(model_path="m", tokenizer_path="m"),
    tokenizer_path="m",
    max_model_len=64,
    vocab_size=64,
)
QWEN = "<tool_call></tool_call> <think></think>"
TOLD = CallSample(takes_tools=True)


def codec(template: str, special_ids: dict[str, int], sample: CallSample = TOLD) -> TextCodec:
    """Return what a dialect is read off."""
    pieces = SimpleNamespace(special_ids=special_ids)
    return cast("TextCodec", SimpleNamespace(template_text=template, call_sample=lambda: sample, pieces=pieces))


@pytest.mark.parametrize(
    ("tool_format", "reasoning_format", "expected"),
    [
        (None, None, (HERMES, THINK)),
        ("llama3", "none", (LLAMA3, None)),
        ("none", "think", (None, THINK)),
    ],
)
def test_the_configuration_has_the_last_word(
    tool_format: str | None, reasoning_format: str | None, expected: tuple[object, object]
) -> None:
    config = replace(CONFIG, tool_format=tool_format, reasoning_format=reasoning_format)
    dialect = dialect_of(config, codec(QWEN, {}))
    assert (dialect.tool_format, dialect.reasoning) == expected


def test_special_tokens_of_the_formats_are_shown_and_no_others() -> None:
    dialect = dialect_of(CONFIG, codec(QWEN, {"<tool_call>": 7, "<think>": 8, "<|end|>": 9}))
    assert dialect.shown == {7: "<tool_call>", 8: "<think>"}
    assert dialect_of(CONFIG, codec("", {"<tool_call>": 7})).shown == {}
    assert dialect_of(CONFIG, codec("", {}, CallSample())).tool_format is JSON


def test_a_template_of_channels_whose_marks_are_special_tokens_speaks_harmony() -> None:
    ids = {mark: place for place, mark in enumerate(MARKS)}
    template = "<|start|>assistant<|channel|>final<|message|>"
    dialect = dialect_of(CONFIG, codec(template, ids))
    assert dialect.is_harmony
    assert (dialect.tool_format, dialect.reasoning, dialect.takes_several) == (None, None, False)
    assert not dialect_of(CONFIG, codec(template, {"<|channel|>": 1})).is_harmony
    assert not dialect_of(CONFIG, codec(QWEN, ids)).is_harmony
    assert not dialect_of(replace(CONFIG, reasoning_format="none"), codec(template, ids)).is_harmony


@pytest.mark.parametrize("tool_format", [None, "hermes"])
def test_a_template_that_takes_one_call_a_turn_is_heard_whatever_the_format(tool_format: str | None) -> None:
    sample = CallSample(takes_tools=True, takes_several=False)
    assert not dialect_of(replace(CONFIG, tool_format=tool_format), codec(QWEN, {}, sample)).takes_several
