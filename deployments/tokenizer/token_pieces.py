"""Derives from the decoder in tokenizer.json what each token of a vocabulary means to a detokenizer.

Decoders that incremental decoding can reproduce exactly are known by name. Any other decoder is refused at startup: a
stream that differs from the decode of its tokens would be silently wrong.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import TypedDict

from tokenizers import Tokenizer

from deployments.stream.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    MarkDetokenizer,
    PieceDetokenizer,
    TokenKind,
)
from engine.errors import CheckpointError

MAX_ANCHOR_CANDIDATES = 20_000
_RAW_BYTE = re.compile(r"<0x..>")


class _Decoder(TypedDict, total=False):
    type: str
    decoders: list[_Decoder]
    pattern: dict[str, str]
    stop: int


class SpellingIndex:
    """The concatenated spellings of all tokens; a search is one pass over them.

    Args:
        spellings: the bytes of token 0, 1, ...
    """

    def __init__(self, spellings: Iterable[bytes]) -> None:
        pieces = list(spellings)
        self._joined = b"".join(pieces)
        self._ends = list(accumulate(map(len, pieces)))

    def containing(self, text: bytes) -> tuple[int, ...]:
        """Return the ids of the tokens that contain `text` (at least one byte), in ascending order."""
        found = []
        at = self._joined.find(text)
        while at >= 0:
            token_id = bisect_right(self._ends, at)
            end = self._ends[token_id]
            if at + len(text) <= end:
                found.append(token_id)
                at = self._joined.find(text, end)
            else:
                # The match extends into the next token.
                at = self._joined.find(text, at + 1)
        return tuple(found)


class TokenPieces:
    """The tokens of one tokenizer; creates a detokenizer for each answer. Thread-safe: its caches only grow.

    Attributes:
        special_ids: id of each special token by its text.

    Raises:
        CheckpointError: the tokenizer's decoder cannot be run incrementally.
    """

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        decoders = _flat(None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__()))
        self._is_byte_level = any(decoder["type"] == "ByteLevel" for decoder in decoders)
        self._has_raw_bytes = any(decoder["type"] == "ByteFallback" for decoder in decoders)
        reason = _why_not(decoders)
        if reason is not None:
            raise CheckpointError(f"{name}: tokenizer.json: {reason}, and text cannot be streamed from it")
        self.special_ids: dict[str, int] = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._bytes_of: Callable[[int], bytes] = cache(self._find_bytes)
        self._kind_of: Callable[[int], TokenKind] = cache(self._find_kind)
        self._inner_of: Callable[[int], str] = cache(self._find_inner)
        if not self._is_byte_level:
            self._anchor_id = self._find_anchor(name)
            self._anchor_text = self.decode([self._anchor_id])

    def new_detokenizer(
        self, shown: Mapping[int, str] | None = None, *, before: Sequence[int] = (), shows_special: bool = False
    ) -> Detokenizer:
        """Return a detokenizer for one answer, whose concatenated output equals `decode` of all tokens fed.

        Args:
            shown: special tokens that are part of the text nevertheless: the text of each by its id.
            before: tokens whose text the answer continues: the output is what it adds to their `decode`.
            shows_special: all special tokens are part of the text, as in `decode`.
        """
        has_begun = any(shows_special or self._kind_of(token_id) is not TokenKind.HIDDEN for token_id in before)
        plain = self._new_plain(has_begun=has_begun)
        if shows_special:
            text_by_id = {token_id: text for text, token_id in self.special_ids.items()} | {**(shown or {})}
            # What comes after a special token does not begin the text.
            return MarkDetokenizer(partial(self._new_plain, has_begun=True), text_by_id, plain)
        return MarkDetokenizer(self._new_plain, shown, plain) if shown else plain

    def _new_plain(self, *, has_begun: bool = False) -> Detokenizer:
        if self._is_byte_level:
            return ByteDetokenizer(self._bytes_of)
        return PieceDetokenizer(
            decode=self.decode, decode_inner=self._decode_inner, kind_of=self._kind_of, has_begun=has_begun
        )

    def decode(self, token_ids: Sequence[int], *, shows_special: bool = False) -> str:
        """Return the text of token ids, without special tokens unless they are to be shown."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=not shows_special)
        return text

    def spelling(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for inside a text; for a special token, its own text."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token in self.special_ids:
            return token.encode()
        if self._is_byte_level:
            return self._bytes_of(token_id)
        if self._kind_of(token_id) is TokenKind.RAW_BYTE:
            return bytes([int(token[3:5], 16)])
        return self._inner_of(token_id).encode()

    def texts(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return each token on its own as text."""
        return tuple(self.spelling(token_id).decode("utf-8", "replace") for token_id in token_ids)

    @cached_property
    def spellings(self) -> SpellingIndex:
        """The spellings of all tokens; reads the whole vocabulary on first use."""
        # Up to the highest id, which the number of tokens is not: some vocabularies have gaps.
        last_id = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return SpellingIndex(map(self.spelling, range(last_id + 1)))

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None or token in self.special_ids else _bytes_of_token(token)

    def _find_kind(self, token_id: int) -> TokenKind:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self.special_ids:
            return TokenKind.HIDDEN
        return TokenKind.RAW_BYTE if self._has_raw_bytes and _RAW_BYTE.fullmatch(token) else TokenKind.TEXT

    def _decode_inner(self, token_ids: Sequence[int]) -> str:
        return self._inner_of(token_ids[0]) if len(token_ids) == 1 else self._find_inner(*token_ids)

    def _find_inner(self, *token_ids: int) -> str:
        return self.decode([self._anchor_id, *token_ids])[len(self._anchor_text) :]

    def _find_anchor(self, name: str) -> int:
        """Return a token with plain text; decoding other tokens after it shows their text inside an answer."""
        for token_id in range(min(self._tokenizer.get_vocab_size(), MAX_ANCHOR_CANDIDATES)):
            if self._kind_of(token_id) is TokenKind.TEXT and self.decode([token_id]).strip():
                return token_id
        raise CheckpointError(f"{name}: tokenizer.json: no token among the first {MAX_ANCHOR_CANDIDATES} is plain text")


def _flat(decoder: _Decoder | None) -> list[_Decoder]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [inner for part in decoder["decoders"] for inner in _flat(part)]
    return [decoder]


def _why_not(decoders: Sequence[_Decoder]) -> str | None:
    """Return the reason why these decoders cannot be run token by token, or None if they can.

    Before a Fuse each decoder sees one token at a time (byte fallback: one run of byte tokens). After it a decoder sees
    the whole text, so its effect must be one that no later token can change.
    """
    types = [decoder["type"] for decoder in decoders]
    if "ByteLevel" in types:
        others = sorted(set(types) - {"ByteLevel", "Fuse"})
        return f"its decoder joins ByteLevel and {others[0]}" if others else None
    is_fused = False
    for decoder in decoders:
        match decoder["type"]:
            case "Fuse":
                is_fused = True
            case "Metaspace" | "WordPiece" | "ByteFallback" if not is_fused:
                pass
            case "Replace" if "String" in decoder["pattern"] and (
                not is_fused or len(decoder["pattern"]["String"]) == 1
            ):
                pass
            case "Strip" if not is_fused or decoder["stop"] == 0:
                pass
            case other:
                return f"its decoder {other} looks at more than one token"
    return None


def _bytes_to_chars() -> dict[int, str]:
    """Return the printable character that represents each byte in a byte-level vocabulary.

    **Source:** the table of GPT-2's encoder: printable Latin-1 maps to itself, the rest to U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


_BYTE_BY_CHAR = {char: byte for byte, char in _bytes_to_chars().items()}


def _bytes_of_token(token: str) -> bytes:
    try:
        return bytes(_BYTE_BY_CHAR[char] for char in token)
    except KeyError:
        # As in the byte-level decoder: an added token with characters outside the table is its own text.
        return token.encode()
