from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deployments.tokenizer.token_pieces import TokenPieces
from tests.deployments.trained_tokenizers import ALL, byte_level
from tests.oracles.naive_detokenizer import naive_certain, naive_text

BUNDLED = Path(__file__).parents[3] / "models" / "stdlib-chat" / "tokenizer.json"
KINDS = sorted(ALL)
ODD_TEXT = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("👋🏽👨‍🇳🇿éẍ̂ � \n.,'▁#")), max_size=20
).filter(bool)


@cache
def trained(kind: str) -> TokenPieces:
    return TokenPieces(ALL[kind](), kind)


def decode_of(tokenizer: Tokenizer):
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)


def joined(pieces: TokenPieces, token_ids: list[int]) -> str:
    detokenizer = pieces.new_detokenizer()
    return "".join([*map(detokenizer.feed, token_ids), detokenizer.close()])


@st.composite
def ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Any ids, with many that are raw bytes or outside the vocabulary."""
    size = tokenizer.get_vocab_size()
    raw = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0x20, 0x41, 0x80, 0xA9, 0xC3, 0xF0, 0x9F, 0x91, 0x8B)]
    odd = [token_id for token_id in raw if token_id is not None] or [size - 1]
    one = st.one_of(st.integers(0, size - 1), st.sampled_from([*odd, size + 7]))
    return draw(st.lists(one, max_size=40))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_pieces_of_any_tokens_join_to_the_decode_of_all(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]()
    token_ids = data.draw(ids(tokenizer))
    assert joined(trained(kind), token_ids) == naive_text(decode_of(tokenizer), token_ids)


# The others put a space between any two words, and so between two special tokens.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("word_piece", "no_decoder")])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_with_special_tokens_shown_the_pieces_join_to_the_decode_that_shows_them(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = ALL[kind]()
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    plain = data.draw(ids(tokenizer))
    token_ids = data.draw(st.permutations([*plain, *data.draw(st.lists(st.sampled_from(special), max_size=3))]))
    detokenizer = trained(kind).new_detokenizer(shows_special=True)
    text = "".join([*map(detokenizer.feed, token_ids), detokenizer.close()])
    assert text == tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@given(text=ODD_TEXT)
@settings(max_examples=25, deadline=None)
def test_the_pieces_of_any_text_join_to_the_decode_of_all(kind: str, text: str) -> None:
    tokenizer = ALL[kind]()
    token_ids = tokenizer.encode(text).ids
    assert joined(trained(kind), token_ids) == naive_text(decode_of(tokenizer), token_ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_answer_that_continues_a_text_is_what_its_tokens_add_to_it(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]()
    before, token_ids = tokenizer.encode("the dog").ids, data.draw(ids(tokenizer))
    detokenizer = trained(kind).new_detokenizer(before=before)
    added = "".join([*map(detokenizer.feed, token_ids), detokenizer.close()])
    assert tokenizer.decode(before) + added == naive_text(decode_of(tokenizer), [*before, *token_ids])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_byte_level_text_is_let_go_as_soon_as_nothing_can_change_it(data: st.DataObject) -> None:
    tokenizer = byte_level()
    # Spelt in the characters that stand for these bytes: the beginnings and the continuations of characters. Not 0xED,
    # after which Python's decoder waits for one byte more than it needs, in case surrogates are to be let through.
    bytes_ids = [tokenizer.token_to_id(char) for char in "aĢĲł¿ÂÃðáãôÀÿ"]
    token_ids = data.draw(st.lists(st.sampled_from(bytes_ids), max_size=12))
    detokenizer = trained("byte_level").new_detokenizer()
    emitted = "".join(detokenizer.feed(token_id) for token_id in token_ids)
    # One character more is decided by at most three bytes.
    lengths = range(1, 4)
    continuations = [list(tail) for length in lengths for tail in product(bytes_ids[1:5], repeat=length)]
    assert emitted == naive_certain(decode_of(tokenizer), token_ids, [*continuations, bytes_ids[:1]])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_no_text_is_let_go_that_a_later_token_changes(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]()
    token_ids, later = data.draw(ids(tokenizer)), data.draw(st.lists(ids(tokenizer), max_size=4))
    detokenizer = trained(kind).new_detokenizer()
    assert naive_certain(decode_of(tokenizer), token_ids, later).startswith("".join(map(detokenizer.feed, token_ids)))


@pytest.mark.skipif(not BUNDLED.exists(), reason="the bundled model is not here")
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_bundled_model_streams_exactly(data: st.DataObject) -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    token_ids = data.draw(st.one_of(ids(tokenizer), ODD_TEXT.map(lambda text: tokenizer.encode(text).ids)))
    assert joined(TokenPieces(tokenizer, "bundled"), token_ids) == tokenizer.decode(token_ids)
