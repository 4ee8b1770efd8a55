"""The draft tokens of one request: where they come from, how often they are right, and what became of predicted ones.

They are looked up in the request's own text and in what the client expects to be the answer, or a draft model guesses
them. The acceptance rate is learned from every new token, whether its draft was computed or only looked up. So a
request that stopped drafting because nothing was right resumes when its text starts to repeat itself. Guesses of a
draft model are learned from only while it is asked. Pure: standard library only.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import cycle, islice, pairwise, takewhile

from engine.request import Request

NEW_SHARE = 0.2
"""Weight of the newest token in the acceptance rate of a source."""
FIRST_LOOKUP_ACCEPTANCE = 0.5
FIRST_PREDICTION_ACCEPTANCE = 0.9
"""A client that sends a prediction expects it to be right."""
NUM_GRAM = 3
"""Tokens that must match: after a match of only two, the text mostly continues differently."""
MAX_PROMPT_TOKENS = 16384
"""Number of tokens at the end of a prompt that are searched."""


class Drafter:
    """The draft sources of one request; call `look_up` before each of its steps.

    Each source has an `acceptance`: the probability that a draft token is right if those before it are, 0 to 1.

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


class PromptLookup:
    """Draft tokens from a request's own text: what followed an earlier occurrence of its last few tokens.

        ids      ... a  b  c  d  e ........ a  b  c
                              [ draft ...          )   the tokens after the newest earlier `a b c`

    A table of fixed size records where each n-gram last occurred, so that a token costs one write and a draft one read,
    however long the text is; if two n-grams collide in it, the newer one remains. Source: prompt lookup decoding
    (Saxena, 2023).
    """

    def __init__(self, prompt_ids: Sequence[int], max_output: int) -> None:
        self.acceptance = FIRST_LOOKUP_ACCEPTANCE
        self._ids = [*prompt_ids[-MAX_PROMPT_TOKENS:]]
        most = min(len(self._ids) + max_output, 2 * MAX_PROMPT_TOKENS)
        # Four entries or more for each n-gram, up to that bound, so few collide. 0 means empty: no n-gram ends there.
        self._mask = (1 << (4 * most - 1).bit_length()) - 1
        self._end_by_hash = array("i", bytes(4 * (self._mask + 1)))
        ids, mask, ends = self._ids, self._mask, self._end_by_hash
        # Skip the last n-gram, which nothing has followed yet.
        for end, gram in enumerate(zip(ids, ids[1:], ids[2:-1], strict=False), NUM_GRAM):
            ends[hash(gram) & mask] = end

    def push(self, token_id: int) -> None:
        """Append a token of the output."""
        if len(self._ids) >= NUM_GRAM:
            self._end_by_hash[hash(tuple(self._ids[-NUM_GRAM:])) & self._mask] = len(self._ids)
        self._ids.append(token_id)

    def draft(self, count: int) -> list[int]:
        """Return `count` tokens that may come next, or none; a match near the end of the text repeats cyclically."""
        gram = self._ids[-NUM_GRAM:]
        end = self._end_by_hash[hash(tuple(gram)) & self._mask]
        if self._ids[end - NUM_GRAM : end] != gram:
            return []
        return list(islice(cycle(self._ids[end : end + count]), count))


class Prediction:
    """Draft tokens from text that the client expects to be the answer, except in some places.

    prediction   a  b  c  d  e  f  g  h
    answer       a  b  X  Y  e  f  g           resynchronized at `e f`, nearest after the point of divergence
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.acceptance = FIRST_PREDICTION_ACCEPTANCE
        self._ids = list(token_ids)
        self._ends_by_pair: dict[tuple[int, int], list[int]] = {}
        for end, pair in enumerate(pairwise(self._ids), 2):
            self._ends_by_pair.setdefault(pair, []).append(end)
        self._place, self._is_lost = 0, False
        self._last_id: int | None = None

    def push(self, token_id: int) -> None:
        """Record a token of the answer."""
        if not self._is_lost and self._ids[self._place : self._place + 1] == [token_id]:
            self._place += 1
        else:
            found = None if self._last_id is None else self._found((self._last_id, token_id))
            self._is_lost = found is None
            self._place = self._place if found is None else found
        self._last_id = token_id

    def draft(self, count: int) -> list[int]:
        """Return what comes next if the prediction is right, at most `count` tokens."""
        return [] if self._is_lost else self._ids[self._place : self._place + count]

    def _found(self, pair: tuple[int, int]) -> int | None:
        """Return the place after the pair: the nearest at or after the current place, else the last one before it."""
        ends = self._ends_by_pair.get(pair)
        return None if ends is None else ends[min(bisect_left(ends, self._place), len(ends) - 1)]


class Guesses:
    """What a draft model guesses, which it is asked for itself."""

    def __init__(self, acceptance: float) -> None:
        self.acceptance = acceptance
