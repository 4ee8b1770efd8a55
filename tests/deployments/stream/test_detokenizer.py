from __future__ import annotations

from collections.abc import Sequence

from deployments.stream.detokenizer import ByteDetokenizer, PieceDetokenizer, TokenKind
from deployments.tokenizer.token_pieces import TokenPieces
from tests.deployments.trained_tokenizers import byte_fallback_bpe, byte_level

WAVE = "👋🏽".encode()


def single_bytes() -> ByteDetokenizer:
    return ByteDetokenizer(lambda token_id: bytes([token_id]))


def test_an_emoji_in_eight_tokens_comes_as_two_whole_characters() -> None:
    detokenizer = single_bytes()
    assert [detokenizer.feed(byte) for byte in WAVE] == ["", "", "", "👋", "", "", "", "🏽"]
    assert detokenizer.close() == ""


def test_an_unfinished_character_at_the_end_is_one_replacement_character() -> None:
    detokenizer = single_bytes()
    assert list(map(detokenizer.feed, WAVE[:3])) == ["", "", ""]
    assert detokenizer.close() == "�"


def test_a_byte_that_begins_no_character_does_not_hold_up_the_text() -> None:
    assert single_bytes().feed(0xFF) == "�"


def test_a_genuine_replacement_character_is_text_like_any_other() -> None:
    assert "".join(map(single_bytes().feed, "a�b".encode())) == "a�b"


def test_a_long_broken_stream_is_decoded_once() -> None:
    detokenizer = single_bytes()
    assert "".join(detokenizer.feed(0xC3) for _ in range(5000)) + detokenizer.close() == "�" * 5000


def test_byte_tokens_wait_for_the_end_of_their_run() -> None:
    tokenizer = byte_fallback_bpe()
    detokenizer = TokenPieces(tokenizer, "test").new_detokenizer()
    c3, a9, end = (tokenizer.token_to_id(token) for token in ("<0xC3>", "<0xA9>", "e"))
    assert [detokenizer.feed(token_id) for token_id in (c3, a9, end)] == ["", "", "ée"]


def test_one_bad_byte_makes_all_its_run_replacement_characters() -> None:
    tokenizer = byte_fallback_bpe()
    detokenizer = TokenPieces(tokenizer, "test").new_detokenizer()
    run = [tokenizer.token_to_id(token) for token in ("<0xC3>", "<0xA9>", "<0xFF>")]
    assert "".join(map(detokenizer.feed, run)) + detokenizer.close() == tokenizer.decode(run) == "���"


def test_special_tokens_and_unknown_ids_show_nothing_and_end_nothing() -> None:
    tokenizer = byte_level()
    detokenizer = TokenPieces(tokenizer, "test").new_detokenizer()
    end, half, rest = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("Ã"), tokenizer.token_to_id("©")
    assert [detokenizer.feed(token_id) for token_id in (half, end, 10**6, rest)] == ["", "", "", "é"]


def test_each_token_is_decoded_a_bounded_number_of_times() -> None:
    decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return "".join(chr(65 + token_id % 26) for token_id in token_ids)

    def kind_of(token_id: int) -> TokenKind:
        return TokenKind.RAW_BYTE if token_id % 100 else TokenKind.TEXT

    detokenizer = PieceDetokenizer(decode=decode, decode_inner=decode, kind_of=kind_of)
    text = "".join(detokenizer.feed(token_id) for token_id in range(10_000)) + detokenizer.close()
    assert len(text) == 10_000
    assert decoded == 10_000


def test_tokens_without_text_at_the_beginning_are_not_gathered_for_ever() -> None:
    decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return ""

    detokenizer = PieceDetokenizer(decode=decode, decode_inner=decode, kind_of=lambda _: TokenKind.TEXT)
    assert not any(map(detokenizer.feed, range(10_000)))
    assert decoded < 11_000
