"""Log-probabilities with the tokens as text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from deployments.answer_events import TokenScore
from engine.request import TokenLogprobs

Spelling = Callable[[int], bytes]
"""Maps a token id to its bytes, as `deployments.tokenizer.token_pieces.TokenPieces` does."""


def scored(
    spelling: Spelling,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    *,
    hidden: Collection[int] = (),
) -> tuple[TokenScore, ...]:
    """Return the scores of tokens, one for each.

    Args:
        hidden: special tokens that the text does not show.
    """
    return tuple(
        _score(spelling, token_id, entry.logprob, hidden)._replace(
            top=tuple(
                _score(spelling, other, logprob)._replace(rank=place)
                for place, (other, logprob) in enumerate(entry.top, 1)
            ),
            rank=entry.rank,
        )
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    )


def scored_prompt(
    spelling: Spelling,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    *,
    hidden: Collection[int] = (),
    text: str | None = None,
) -> tuple[TokenScore, ...]:
    """Return the scores of a prompt's tokens like `scored`; the first has no log-probability: nothing precedes it.

    Args:
        text: the prompt as the client is shown it, without the space that some tokenizers put in front of a text.
    """
    scores = (
        _score(spelling, token_ids[0], None, hidden),
        *scored(spelling, token_ids[1:], logprobs, hidden=hidden),
    )
    if text is None or b"".join(score.raw for score in scores) != b" " + text.encode():
        return scores
    place = next(place for place, score in enumerate(scores) if score.raw)
    return *scores[:place], scores[place]._replace(raw=scores[place].raw[1:]), *scores[place + 1 :]


def _score(spelling: Spelling, token_id: int, logprob: float | None, hidden: Collection[int] = ()) -> TokenScore:
    raw = spelling(token_id)
    return TokenScore(token_id, raw.decode("utf-8", "replace"), b"" if token_id in hidden else raw, logprob)
