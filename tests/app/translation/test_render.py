from __future__ import annotations

from app.translation.render import TextScores
from deployments.generation import TokenScore


def test_offsets_count_a_character_once_though_several_tokens_spell_it() -> None:
    spelt = "é🙂!".encode()
    scores = [TokenScore(byte, "\ufffd", bytes([byte]), -0.5) for byte in spelt]
    told = TextScores()
    assert told.next(scores[:4]).text_offset == [0, 0, 1, 1]
    assert told.next(scores[4:]).text_offset == [1, 1, 2]
