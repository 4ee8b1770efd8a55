"""The formats in which one model writes reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.config import ModelConfig
from deployments.stream.harmony import CHANNEL, MARKS
from deployments.stream.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_of_template
from deployments.tokenizer.text_codec import TextCodec
from deployments.tools.formats import FORMATS, ToolFormat, format_of_template


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The formats of one model.

    Attributes:
        tool_format: None if the model's tool calls have no known format.
        takes_several: the chat template accepts several tool calls in one turn.
        reasoning: None for a model without reasoning.
        is_harmony: answers are messages in channels (Harmony), and both formats above are None.
        special_ids: ids of the model's special tokens by text.
    """

    tool_format: ToolFormat | None = None
    takes_several: bool = True
    reasoning: ReasoningFormat | None = None
    is_harmony: bool = False
    special_ids: Mapping[str, int]

    @property
    def shown(self) -> dict[int, str]:
        """Texts of the special tokens that belong to the formats, by id."""
        marks = set() if self.tool_format is None else set(self.tool_format.pieces)
        if self.reasoning is not None:
            marks |= {self.reasoning.begin, self.reasoning.end}
        return {self.special_ids[mark]: mark for mark in marks & self.special_ids.keys()}


def dialect_of(config: ModelConfig, codec: TextCodec) -> Dialect:
    """Return the configured formats ("none" disables one), or else those detected in the chat template."""
    template, special_ids = codec.template_text, codec.pieces.special_ids
    is_open = config.tool_format is None and config.reasoning_format is None
    if is_open and CHANNEL in template and special_ids.keys() >= set(MARKS):
        return Dialect(takes_several=False, is_harmony=True, special_ids=special_ids)
    sample = codec.call_sample()
    tool_format = (
        format_of_template(template, sample) if config.tool_format is None else FORMATS.get(config.tool_format)
    )
    reasoning = (
        reasoning_of_template(template)
        if config.reasoning_format is None
        else REASONING_FORMATS.get(config.reasoning_format)
    )
    return Dialect(
        tool_format=tool_format,
        takes_several=sample.takes_several,
        reasoning=reasoning,
        special_ids=special_ids,
    )
