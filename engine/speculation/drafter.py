"""One request's drafts: where they come from, how often they are right, and what became of those of its prediction.

How often is learned from every token that comes, whether it was drafted or only looked up: who stopped drafting
because nothing was right begins again where the text has become one that repeats itself. Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from engine.request import Request
from engine.speculation.prediction import Prediction
from engine.speculation.prompt_lookup import PromptLookup

NEW_SHARE = 0.2
"""Weight of the newest token in how often a source is right."""


class DraftSource(Protocol):
    """A text that an answer may go on as.

    Attributes:
        acceptance: how likely a token of a draft is right if those before it are, 0 to 1.
    """

    acceptance: float

    def push(self, token_id: int) -> None:
        """Take note of a token of the output."""
        ...

    def draft(self, count: int) -> list[int]:
        """Return what may come next, at most `count` tokens."""
        ...


class Drafter:
    """The draft sources of one request; `look_up` is asked before each of its steps.

    Attributes:
        num_accepted, num_rejected: tokens of the prediction that the answer took, and that were computed in vain.
    """

    def __init__(self, request: Request) -> None:
        self._sources: list[DraftSource] = [PromptLookup(request.prompt_ids, request.params.max_tokens)]
        if request.prediction_ids:
            self._sources.append(Prediction(request.prediction_ids))
        self._source = self._sources[0]
        self._expected: list[int] = []
        self._num_seen = 0
        self.num_accepted = self.num_rejected = 0

    @property
    def acceptance(self) -> float:
        """How likely a token of the newest draft is right if those before it are, 0 to 1."""
        return self._source.acceptance

    def look_up(self, output_ids: Sequence[int], count: int, stop_ids: frozenset[int]) -> list[int]:
        """Return what may follow the output, at most `count` tokens up to one that would end the answer."""
        self._read(output_ids)
        drafts = [(source, source.draft(count)) for source in self._sources]
        # Of equally good ones the later: what was predicted rather than what was found.
        self._source, self._expected = max(reversed(drafts), key=lambda found: (bool(found[1]), found[0].acceptance))
        return list(takewhile(lambda token_id: token_id not in stop_ids, self._expected))

    def note(self, num_drafted: int, num_right: int) -> None:
        """Take note of what became of the newest draft, as far as it was computed."""
        if isinstance(self._source, Prediction):
            self.num_accepted += num_right
            self.num_rejected += num_drafted - num_right

    def _read(self, output_ids: Sequence[int]) -> None:
        """Learn from the tokens that have come since."""
        new_ids = output_ids[self._num_seen :]
        for token_id, expected in zip(new_ids, self._expected, strict=False):
            self._source.acceptance += NEW_SHARE * ((token_id == expected) - self._source.acceptance)
            if token_id != expected:
                break
        for token_id in new_ids:
            for source in self._sources:
                source.push(token_id)
        self._num_seen += len(new_ids)
