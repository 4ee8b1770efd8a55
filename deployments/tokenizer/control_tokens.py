"""Prevents control token injection: text in a message that spells a control token stays plain text.

A chat template writes control tokens around the messages as text, and one tokenizer pass turns both into ids, so a
message that spells a control token could open a turn of its own. For messages that could do so:

1. `disarm` puts a private mark where a message spells a control token (or could complete one with adjacent text).
2. The template renders the marked messages, so all control tokens in the result are the template's.
3. `encode` renames those, restores the typed text, and encodes everything in one pass with a tokenizer that knows the
   new names but no control tokens. Ordinary text therefore gets exactly the tokens of a plain pass.

Each process draws random names, so nobody can type them.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer

from deployments.tools.sample import num_alike
from engine.errors import RequestError


class ControlTokens:
    """The special tokens of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._id_by_text = {token.content: token_id for token_id, token in added.items() if token.special}
        self._tokens = [token for token in added.values() if token.special]
        self._any = any_of(self._id_by_text)
        self._beginnings = frozenset(text[:cut] for text in self._id_by_text for cut in range(1, len(text)))
        self._endings = frozenset(text[cut:] for text in self._id_by_text for cut in range(1, len(text)))
        self._longest = max(map(len, self._id_by_text), default=0)
        nonce = secrets.token_hex(8)
        # Private-use characters around a secret: normalizers leave them alone and nobody can guess them.
        self._name_by_text = {text: f"\ue000{nonce}n{i}\ue001" for i, text in enumerate(self._id_by_text)}
        self._mark_by_text = {text: f"\ue000{nonce}m{i}\ue001" for i, text in enumerate(self._id_by_text)}
        self._gap = f"\ue000{nonce}g\ue001"
        self._text_by_mark = {mark: text for text, mark in self._mark_by_text.items()} | {self._gap: ""}
        self._any_mark = any_of(self._text_by_mark)
        self._deaf: Tokenizer | None = None
        self._lock = threading.Lock()

    def disarm(self, text: str) -> str:
        """Return the text with private marks where it spells a control token or could complete one."""
        cuts = range(1, min(self._longest, len(text) + 1))
        before = self._gap if any(text[:cut] in self._endings for cut in cuts) else ""
        after = self._gap if any(text[-cut:] in self._beginnings for cut in cuts) else ""
        return before + self._any.sub(lambda found: self._mark_by_text[found[0]], text) + after

    def encode(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered template whose messages were disarmed.

        Raises:
            RequestError: the tokenizer's model itself produces a control token from plain characters.
        """
        deaf = self._deaf_tokenizer()
        named = self._any.sub(lambda found: self._name_by_text[found[0]], rendered)
        typed = self._any_mark.sub(lambda found: self._text_by_mark[found[0]], named)
        id_by_name_id = {deaf.token_to_id(name): self._id_by_text[text] for text, name in self._name_by_text.items()}
        token_ids = deaf.encode(typed, add_special_tokens=False).ids
        if not frozenset(self._id_by_text.values()).isdisjoint(token_ids):
            raise RequestError(
                "messages must not contain the text of a control token, which this model's tokenizer cannot tell from "
                "the token itself",
                field="messages",
            )
        return [id_by_name_id.get(token_id, token_id) for token_id in token_ids]

    def _deaf_tokenizer(self) -> Tokenizer:
        # Created on first use: it takes as much memory as the tokenizer itself.
        with self._lock:
            if self._deaf is None:
                deaf = Tokenizer.from_str(self._tokenizer.to_str())
                deaf.encode_special_tokens = True
                deaf.add_tokens([self._renamed(token) for token in self._tokens])
                self._deaf = deaf
            return self._deaf

    def _renamed(self, token: AddedToken) -> AddedToken:
        return AddedToken(**token.__getstate__() | {"content": self._name_by_text[token.content], "special": False})


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of the words at a place.

    Words that begin alike share their beginnings, so that a place is compared with a few of them, not with all.
    """
    return re.compile(_shared(words) or r"(?!)")


def _shared(words: Iterable[str]) -> str:
    alike: dict[str, list[str]] = defaultdict(list)
    for word in words:
        alike[word[:1]].append(word)
    # One of the words ends here, and the others go on.
    is_end = alike.pop("", None) is not None
    if not alike:
        return ""
    return f"(?:{'|'.join(map(_begun_alike, alike.values()))}){'?' if is_end else ''}"


def _begun_alike(words: list[str]) -> str:
    # What the first and the last in order have in common, all have.
    length = num_alike(min(words), max(words))
    return re.escape(words[0][:length]) + _shared(word[length:] for word in words)
