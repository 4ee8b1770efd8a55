"""Token ids in, text out, piece by piece: the pieces joined are the decode of all the ids, and no character is broken.

Pure: what a token means is told by the callables that `deployments.tokenizer.token_pieces` makes from a tokenizer. Two
families cover the tokenizers in use, each O(1) amortised for a token:

- byte-level BPE: every token is some bytes; an incremental UTF-8 decoder holds back an unfinished character (at most
  three bytes) and turns bytes that can never be one into U+FFFD, as the tokenizer does.
- all others (Metaspace, WordPiece, SentencePiece with byte fallback): every token is some text, which differs only
  between the first place and the others, except runs of byte tokens. A run decodes as a whole (one bad byte makes
  all of it U+FFFD), so that it is held back until a token of another kind ends it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

MAX_FIRST_TOKENS = 16
"""Tokens without any text after which the text counts as begun."""


class Detokenizer(Protocol):
    """The decoder of one answer."""

    def feed(self, token_id: int) -> str:
        """Return the text that this token has made certain; it may be empty."""
        ...

    def close(self) -> str:
        """Return what was held back, as the end of the text decodes it; nothing may be fed afterwards."""
        ...


class ByteDetokenizer:
    """The decoder for tokens that are bytes of UTF-8.

    Args:
        bytes_of: the bytes of a token; empty for tokens that are not shown (special, unknown).
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Return the characters that this token has completed."""
        return self._utf8.decode(self._bytes_of(token_id))

    def close(self) -> str:
        """Return U+FFFD where the last character is unfinished, else nothing."""
        return self._utf8.decode(b"", final=True)


class TokenKind(Enum):
    """How a token takes part in the text."""

    HIDDEN = auto()
    """Not shown and not counted as a place: special tokens, ids without a token."""
    TEXT = auto()
    """Whole characters."""
    RAW_BYTE = auto()
    """One byte of a run that decodes as a whole."""


class PieceDetokenizer:
    """The decoder for tokens that are text, with runs of byte tokens between them.

    Args:
        decode: text of a whole answer that consists of these tokens.
        decode_inner: text that these tokens add where another token with text stands before them.
        kind_of: the kind of a token.
    """

    def __init__(
        self,
        *,
        decode: Callable[[Sequence[int]], str],
        decode_inner: Callable[[Sequence[int]], str],
        kind_of: Callable[[int], TokenKind],
    ) -> None:
        self._decode = decode
        self._decode_inner = decode_inner
        self._kind_of = kind_of
        self._has_begun = False
        self._held: list[int] = []
        self._ends_in_raw_bytes = False

    def feed(self, token_id: int) -> str:
        """Return the text of the tokens so far that no later token can change."""
        kind = self._kind_of(token_id)
        if kind is TokenKind.HIDDEN:
            return ""
        is_raw = kind is TokenKind.RAW_BYTE
        run = self._take_held() if self._held and self._ends_in_raw_bytes and not is_raw else ""
        self._held.append(token_id)
        self._ends_in_raw_bytes = is_raw
        return run if is_raw else run + self._take_held()

    def close(self) -> str:
        """Return the text of a run of byte tokens that the answer ends with."""
        text = self._decode_held() if self._held else ""
        self._held = []
        return text

    def _take_held(self) -> str:
        text = self._decode_held()
        # A decoder that strips the front of the text may leave nothing of the first tokens; as long as that is so,
        # what follows decodes together with them.
        if not text and not self._has_begun and len(self._held) < MAX_FIRST_TOKENS:
            return ""
        self._has_begun = True
        self._held = []
        return text

    def _decode_held(self) -> str:
        return self._decode_inner(self._held) if self._has_begun else self._decode(self._held)


class MarkDetokenizer:
    """The decoder for an answer in which some special tokens are part of the text: they end what stands before them.

    Args:
        new_plain: makes the decoder of a piece between two marks.
        text_by_id: the marks.
    """

    def __init__(self, new_plain: Callable[[], Detokenizer], text_by_id: Mapping[int, str]) -> None:
        self._new_plain = new_plain
        self._text_by_id = text_by_id
        self._plain = new_plain()

    def feed(self, token_id: int) -> str:
        """Return the text that this token has made certain."""
        mark = self._text_by_id.get(token_id)
        if mark is None:
            return self._plain.feed(token_id)
        ended, self._plain = self._plain, self._new_plain()
        return ended.close() + mark

    def close(self) -> str:
        """Return what was held back."""
        return self._plain.close()
