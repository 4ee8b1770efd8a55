from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.config import ModelConfig
from deployments.gateway.dialect import dialect_of
from deployments.stream.reasoning import THINK
from deployments.tools.formats import HERMES, JSON, LLAMA3
from engine.config import EngineConfig

CONFIG = ModelConfig(
    name="m",
    engine=EngineConfig(model_path="m", tokenizer_path="m"),
    tokenizer_path="m",
    max_model_len=64,
    vocab_size=64,
)
QWEN = "<tool_call></tool_call> <think></think>"


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
    dialect = dialect_of(config, QWEN, {})
    assert (dialect.tool_format, dialect.reasoning) == expected


def test_special_tokens_of_the_formats_are_shown_and_no_others() -> None:
    dialect = dialect_of(CONFIG, QWEN, {"<tool_call>": 7, "<think>": 8, "<|end|>": 9})
    assert dialect.shown == {7: "<tool_call>", 8: "<think>"}
    assert dialect_of(CONFIG, "", {"<tool_call>": 7}).shown == {}
    assert dialect_of(CONFIG, "", {}).tool_format is JSON
