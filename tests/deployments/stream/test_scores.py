from __future__ import annotations

from deployments.generation import TokenScore
from deployments.stream.scores import HeldScores


def score(token_id: int) -> TokenScore:
    return TokenScore(token_id, "", b"", -1.0)


def held() -> HeldScores:
    """Tokens of 3, 0 and 2 characters."""
    scores = HeldScores()
    for token_id, (start, end) in enumerate([(0, 3), (3, 3), (3, 5)]):
        scores.add(start, end, score(token_id))
    return scores


def ids(scores: tuple[TokenScore, ...]) -> list[int]:
    return [found.token_id for found in scores]


def test_a_token_leaves_with_its_last_character_and_only_once() -> None:
    scores = held()
    assert ids(scores.release(2)) == []
    assert ids(scores.release(3)) == [0, 1]
    assert ids(scores.release(4)) == []
    assert ids(scores.release(5)) == [2]
    assert ids(scores.close(None)) == []


def test_at_a_cut_only_tokens_that_show_something_are_left() -> None:
    assert ids(held().close(4)) == [0, 1, 2]
    assert ids(held().close(3)) == [0]
    assert ids(held().close(0)) == []


def test_at_the_end_of_a_whole_text_all_are_left() -> None:
    assert ids(held().close(None)) == [0, 1, 2]
