"""Incremental detokenizers: the concatenated pieces equal the decode of all ids, and no piece splits a character.

Pure: the callables that `deployments.tokenizer.token_pieces` builds from a tokenizer say what each token means. Two
families cover the tokenizers in use, each amortized O(1) per token:

- Byte-level BPE: every token is a byte string. An incremental UTF-8 decoder holds back an incomplete character (at
  most three bytes) and replaces invalid bytes by U+FFFD, as the tokenizer does.
- All others (Metaspace, WordPiece, SentencePiece with byte fallback): every token is text that depends only on whether
  it comes first, except for runs of byte tokens. A run decodes as a whole (one bad byte turns all of it into U+FFFD),
  so it is held back until a token of another kind ends it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

MAX_FIRST_TOKENS = 16
"""After this many leading tokens that decode to no text, the text counts as begun."""


class Detokenizer(Protocol):
    """The incremental decoder of one answer."""

    @property
    def holds_text(self) -> bool:
        """Whether text is held back, of which a later token decides."""
        ...

    def feed(self, token_id: int) -> str:
        """Return the text that is final after this token, possibly empty."""
        ...

    def close(self) -> str:
        """Return the text held back, decoded as the end of the answer. No `feed` may follow."""
        ...


class ByteDetokenizer:
    """Decodes tokens that are UTF-8 byte strings.

    Args:
        bytes_of: the bytes of a token; empty for hidden tokens (special, unknown).
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def holds_text(self) -> bool:
        """Whether the last character is incomplete."""
        return bool(self._utf8.getstate()[0])

    def feed(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        return self._utf8.decode(self._bytes_of(token_id))

    def close(self) -> str:
        """Return U+FFFD if the last character is incomplete, else an empty string."""
        return self._utf8.decode(b"", final=True)


class TokenKind(Enum):
    """How a token contributes to the text."""

    HIDDEN = auto()
    """Contributes nothing and does not count as the first token: special tokens, ids without a token."""
    TEXT = auto()
    """Whole characters."""
    RAW_BYTE = auto()
    """One byte of a run that decodes as a whole."""


class PieceDetokenizer:
    """Decodes tokens that are text, interspersed with runs of byte tokens.

    Args:
        decode: the text of these tokens as a whole answer.
        decode_inner: the text that these tokens add after another token with text.
        kind_of: the kind of a token.
        has_begun: the tokens continue a text, so none of them is its first.
    """

    def __init__(
        self,
        *,
        decode: Callable[[Sequence[int]], str],
        decode_inner: Callable[[Sequence[int]], str],
        kind_of: Callable[[int], TokenKind],
        has_begun: bool = False,
    ) -> None:
        self._decode = decode
        self._decode_inner = decode_inner
        self._kind_of = kind_of
        self._has_begun = has_begun
        self._held: list[int] = []

    @property
    def holds_text(self) -> bool:
        """Whether tokens are held that are decoded with later ones."""
        return bool(self._held)

    def feed(self, token_id: int) -> str:
        """Return the new text that no later token can change."""
        kind = self._kind_of(token_id)
        if kind is TokenKind.HIDDEN:
            return ""
        self._held.append(token_id)
        return "" if kind is TokenKind.RAW_BYTE else self._take_held()

    def close(self) -> str:
        """Return the text held back, such as a run of byte tokens at the end of the answer."""
        return self._decode_held()

    def _take_held(self) -> str:
        text = self._decode_held()
        # A decoder that strips the start of the text may drop the first tokens entirely. Until some text appears, later
        # tokens must be decoded together with them.
        if not text and not self._has_begun and len(self._held) < MAX_FIRST_TOKENS:
            return ""
        self._has_begun = True
        self._held = []
        return text

    def _decode_held(self) -> str:
        return self._decode_inner(self._held) if self._has_begun else self._decode(self._held)


class MarkDetokenizer:
    """Decodes an answer in which some special tokens, the marks, are part of the text. A mark ends the text before it.

    Args:
        new_plain: creates the decoder for the text between two marks.
        text_by_id: the text of each mark.
        first: decodes the text before the first mark.
    """

    def __init__(self, new_plain: Callable[[], Detokenizer], text_by_id: Mapping[int, str], first: Detokenizer) -> None:
        self._new_plain = new_plain
        self._text_by_id = text_by_id
        self._plain = first

    @property
    def holds_text(self) -> bool:
        """Whether the text before the next mark is."""
        return self._plain.holds_text

    def feed(self, token_id: int) -> str:
        """Return the text that is final after this token."""
        mark = self._text_by_id.get(token_id)
        if mark is None:
            return self._plain.feed(token_id)
        ended, self._plain = self._plain, self._new_plain()
        return ended.close() + mark

    def close(self) -> str:
        """Return the text held back."""
        return self._plain.close()
