"""The draft tokens of one request: where they come from, how often they are right, and what became of predicted ones.

The acceptance rate is learned from every new token, whether its draft was computed or only looked up. So a request that
stopped drafting because nothing was right resumes when its text starts to repeat itself. Guesses of a draft model are
learned from only while it is asked. Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from engine.request import Request
from engine.speculation.prediction import Prediction
from engine.speculation.prompt_lookup import PromptLookup

NEW_SHARE = 0.2
"""Weight of the newest token in the acceptance rate of a source."""


class Guesses:
    """What a draft model guesses.

    Attributes:
        acceptance: as of the other sources, the probability that a draft token is right if those before it are, 0 to 1.
    """

    def __init__(self, acceptance: float) -> None:
        self.acceptance = acceptance


class Drafter:
    """The draft sources of one request; call `look_up` before each of its steps.

    Args:
        agreement: the acceptance rate to expect of a draft model.

    Attributes:
        guesses: of a draft model, if there is one.
        num_accepted, num_rejected: predicted tokens that the answer took, and those computed in vain.
    """

    def __init__(self, request: Request, agreement: float = 0.0) -> None:
        self._sources: list[PromptLookup | Prediction] = [PromptLookup(request.prompt_ids, request.params.max_tokens)]
        if request.prediction_ids:
            self._sources.append(Prediction(request.prediction_ids))
        self.guesses = Guesses(agreement)
        self._source: PromptLookup | Prediction | Guesses = self._sources[0]
        self._expected: list[int] = []
        self._num_seen = 0
        self.num_accepted = self.num_rejected = 0

    @property
    def has_guessed(self) -> bool:
        """Whether the newest draft is a draft model's."""
        return self._source is self.guesses

    @property
    def acceptance(self) -> float:
        """Probability that a token of the newest draft is right if those before it are, 0 to 1."""
        return self._source.acceptance

    def look_up(self, output_ids: Sequence[int], count: int, stop_ids: frozenset[int]) -> list[int]:
        """Return draft tokens to follow the output, at most `count`, stopping before one that would end the answer."""
        self._read(output_ids)
        drafts = [(source, source.draft(count)) for source in self._sources]
        # Among equals the later source wins: the prediction, not the lookup.
        self._source, self._expected = max(reversed(drafts), key=lambda found: (bool(found[1]), found[0].acceptance))
        return _without_end(self._expected, stop_ids)

    def guess(self, draft_ids: list[int], stop_ids: frozenset[int]) -> list[int]:
        """Return what a draft model guessed, instead of what was looked up, up to a token that would end the answer."""
        self._source, self._expected = self.guesses, draft_ids
        return _without_end(draft_ids, stop_ids)

    def note(self, num_drafted: int, num_right: int) -> None:
        """Record how many tokens of the newest draft were computed, and how many were right."""
        if isinstance(self._source, Prediction):
            self.num_accepted += num_right
            self.num_rejected += num_drafted - num_right

    def _read(self, output_ids: Sequence[int]) -> None:
        """Learn from the output tokens since the last call."""
        new_ids = output_ids[self._num_seen :]
        for token_id, expected in zip(new_ids, self._expected, strict=False):
            self._source.acceptance += NEW_SHARE * ((token_id == expected) - self._source.acceptance)
            if token_id != expected:
                break
        for token_id in new_ids:
            for source in self._sources:
                source.push(token_id)
        self._num_seen += len(new_ids)


def _without_end(draft_ids: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    return list(takewhile(lambda token_id: token_id not in stop_ids, draft_ids))
