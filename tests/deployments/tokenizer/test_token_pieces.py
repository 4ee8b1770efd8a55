from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.tokenizer.token_pieces import SpellingIndex

BYTES = st.lists(st.sampled_from([b"a", b"b", b"\n"]), max_size=5).map(b"".join)


@given(st.lists(BYTES, max_size=12), BYTES.filter(bool))
def test_it_finds_the_tokens_that_a_look_at_each_finds(spellings: list[bytes], text: bytes) -> None:
    expected = tuple(token_id for token_id, spelling in enumerate(spellings) if text in spelling)
    assert SpellingIndex(spellings).containing(text) == expected
