"""Incrementally separates the thoughts of a reasoning model from the content of its answer.

    <think>
    First, ...
    </think>

    The answer is 4.

Pure; the result does not depend on how the text was split into pieces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WHITE_SPACE = " \t\r\n"
MAX_SPACE = 64
"""Most characters of white space that wait for a mark behind them: a model may write it without end, and what waits
is looked at again with each token. Far more than any grammar of ours lets pass there."""
_LITERAL_END = r"""(?:\\n|\s)*+(?:['"]|\{[%{]|$)"""
"""What follows the last word that a template writes: a quote or a tag, behind line breaks as such or as escapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around the thoughts."""

    name: str
    begin: str
    end: str


THINK = ReasoningFormat(name="think", begin="<think>", end="</think>")
MISTRAL_THINK = ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]")
SEED_THINK = ReasoningFormat(name="seed", begin="<seed:think>", end="</seed:think>")

REASONING_FORMATS = {reasoning.name: reasoning for reasoning in (THINK, MISTRAL_THINK, SEED_THINK)}
_OTHER_MARKS = ("<|channel>", "<|inner_prefix|>", "<|START_THINKING|>")
"""Marks of thoughts in no format of ours: Gemma 4, Apertus, Command R7B."""


def reasoning_of_template(template: str) -> ReasoningFormat | None:
    """Return the reasoning format of the model with this chat template, or None if it does not reason."""
    found = next((reasoning for reasoning in REASONING_FORMATS.values() if _has(template, reasoning)), None)
    if found is not None or any(mark in template for mark in _OTHER_MARKS):
        return found
    # A template with only a switch for thinking does not show the marks; nearly all such models use these.
    return THINK if "enable_thinking" in template else None


def _has(template: str, reasoning: ReasoningFormat) -> bool:
    # A template that keeps earlier thoughts as they are (OLMo 3) shows no end, but begins the answer with thoughts.
    # Instructions may name the mark too, but not as the last word before the answer.
    _, _, prompt_end = template.partition("add_generation_prompt")
    return reasoning.end in template or bool(re.search(re.escape(reasoning.begin) + _LITERAL_END, prompt_end))


class ReasoningSplit:
    """Splits one answer into thoughts and content.

    Args:
        has_begun: the prompt already opened the thoughts.
        continues: the prompt also holds the first of them, so that white space may separate the next words.
    """

    def __init__(self, reasoning: ReasoningFormat, *, has_begun: bool, continues: bool = False) -> None:
        self._format = reasoning
        self._is_thinking = has_begun
        self._may_begin = not has_begun
        self.has_thought = has_begun
        """Whether thoughts have begun, whether or not they have ended."""
        self._is_front = has_begun and not continues
        self._held = ""

    @property
    def is_over(self) -> bool:
        """Whether all further text is content."""
        return not self._is_thinking and not self._may_begin

    @property
    def num_held(self) -> int:
        """How many of the last characters are held back."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str]:
        """Return the new thoughts and content that are final. White space around the thoughts is stripped.

        Of that behind them at most MAX_SPACE characters are.
        """
        self._held += text
        if self._may_begin and not self._begin():
            return "", ""
        thoughts = self._think() if self._is_thinking else ""
        return thoughts, self._content()

    def close(self) -> tuple[str, str]:
        """Return the thoughts and content held back."""
        held, self._held = self._held, ""
        if self._is_thinking:
            return (held if held.strip(WHITE_SPACE) else ""), ""
        return "", held

    def _begin(self) -> bool:
        front = self._held.lstrip(WHITE_SPACE)
        is_near = len(self._held) - len(front) <= MAX_SPACE
        if is_near and len(front) < len(self._format.begin) and self._format.begin.startswith(front):
            return False
        self._may_begin = False
        if is_near and front.startswith(self._format.begin):
            self._held = front[len(self._format.begin) :]
            self._is_thinking = self._is_front = self.has_thought = True
        return True

    def _think(self) -> str:
        if self._is_front:
            self._held = self._held.lstrip(WHITE_SPACE)
            self._is_front = not self._held
        end = self._held.find(self._format.end)
        if end >= 0:
            thoughts = self._held[: without_space(self._held, end)]
            self._held = self._held[end + len(self._format.end) :]
            self._is_thinking = False
            self._is_front = True
            return thoughts
        place = without_space(self._held, len(self._held) - overlap(self._held, self._format.end))
        thoughts, self._held = self._held[:place], self._held[place:]
        return thoughts

    def _content(self) -> str:
        if self._is_thinking:
            return ""
        if self._is_front:
            self._held = self._held.lstrip(WHITE_SPACE)
            self._is_front = not self._held
        content, self._held = self._held, ""
        return content


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` that `text` ends with."""
    place = text.find(mark[:1], max(0, len(text) - len(mark) + 1))
    while place >= 0 and not mark.startswith(text[place:]):
        place = text.find(mark[:1], place + 1)
    return len(text) - place if place >= 0 else 0


def without_space(text: str, end: int) -> int:
    """Return where white space before `end` begins, at most MAX_SPACE characters before it."""
    start = max(0, end - MAX_SPACE)
    return start + len(text[start:end].rstrip(WHITE_SPACE))


class ReasoningCounter:
    """Counts the tokens of the thoughts, including the marks around them."""

    def __init__(self, reasoning: ReasoningFormat, *, has_begun: bool) -> None:
        self._split = ReasoningSplit(reasoning, has_begun=has_begun)
        self._num_seen = 0
        self.num_tokens = 0

    def feed(self, text: str) -> None:
        """Count one token, given the text that became final with it."""
        if self._split.is_over:
            return
        self._num_seen += 1
        self._split.feed(text)
        if self._split.has_thought:
            self.num_tokens = self._num_seen
