"""Text to token ids and back for one checkpoint, with its own tokenizer.json and chat template.

Enforces the bounds on text and words refusals in terms of the caller's request. Templates come from the checkpoint or
the configuration, never from an adapter's files. Thread-safe; independent of Ray.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

from deployments.generation import ChatPrompt
from deployments.prompt_texts import texts_in
from deployments.tokenizer.chat_template import ChatTemplate, changed, tool_fields, turn_fields
from deployments.tokenizer.control_tokens import ControlTokens
from deployments.tokenizer.token_pieces import TokenPieces
from deployments.tokenizer.tokenizer_folder import load_tokenizer, omitted_end
from deployments.tools.sample import CallSample
from engine.errors import CheckpointError, RequestError

DEFAULT_MAX_CHARS = 1_000_000
OTHER_FORMS = ("tekken.json", "tokenizer.model", "vocab.json")
"""Tokenizer files that specify less than tokenizer.json and are not read."""
PREFIX, SUFFIX = "prefix", "suffix"
MIDDLE_FORMS = (
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),
)
"""Prompts to fill in text, by tokens of the tokenizer: Qwen Coder and CodeGemma, StarCoder and Granite, DeepSeek Coder,
Codestral (Bavarian et al., 2022, arXiv 2207.14255)."""


class TextCodec:
    """The tokenizer of one checkpoint folder.

    Args:
        tokenizer_path: folder with tokenizer.json.
        max_chars: maximum characters of one prompt, both before and after rendering.

    Attributes:
        pieces: the tokens and the conversion back to text.
        omitted_end: token to end the texts of embeddings with, as in `deployments.tokenizer.tokenizer_folder`.
        key: digest of the tokenizer's files, the bound and the chat templates; equal for codecs that encode alike.

    Raises:
        CheckpointError: the folder has no usable tokenizer.json.
    """

    def __init__(self, tokenizer_path: str, *, max_chars: int = DEFAULT_MAX_CHARS) -> None:
        self._name = os.path.basename(os.path.normpath(tokenizer_path))
        self._max_chars = max_chars
        if not os.path.isfile(os.path.join(tokenizer_path, "tokenizer.json")):
            others = [name for name in OTHER_FORMS if os.path.isfile(os.path.join(tokenizer_path, name))]
            hint = f"; it has {others[0]}, which is not read: save the tokenizer by transformers" if others else ""
            raise CheckpointError(f"{tokenizer_path}: there is no tokenizer.json{hint}")
        loaded = load_tokenizer(tokenizer_path)
        self._files_digest = _files_digest(Path(tokenizer_path))
        backend = loaded.backend
        # The file may still have padding and truncation settings from training.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.omitted_end = omitted_end(tokenizer_path, loaded)
        self._control_tokens = ControlTokens(backend)
        self.pieces = TokenPieces(backend, self._name)
        self._special_tokens = loaded.special_tokens
        self._set_templates(loaded.templates)

    def with_template(self, source: str) -> TextCodec:
        """Return a codec with another chat template; all else is shared.

        Raises:
            CheckpointError: it cannot be compiled.
        """
        other = copy(self)
        other._set_templates({"default": source})
        return other

    def _set_templates(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        told = repr((self._files_digest, self._max_chars, sources))
        self.key = hashlib.sha256(told.encode()).hexdigest()
        self._template = ChatTemplate(sources, self._special_tokens, max_chars=self._max_chars)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` is available."""
        return "default" in self._sources

    @property
    def template_text(self) -> str:
        """The source of all chat templates, which shows the marks that the model was trained to write."""
        return "\n".join(self._sources.values())

    def call_sample(self) -> CallSample:
        """Return how the chat template writes calls."""
        return self._template.call_sample() if self.has_chat_template else CallSample()

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Return the token ids of a conversation rendered with the model's template, up to where the answer begins.

        Control tokens come only from the template; in messages and tools their text stays plain text.

        Raises:
            RequestError: no template, messages that the template refuses, or text that is too long or not Unicode.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template: use /v1/completions with a prompt", field="messages")
        turns, tools = turn_fields(prompt.messages), tool_fields(prompt.tools)
        options = prompt.template_options
        self._check(list(texts_in((turns, options))), field="messages")
        self._check(list(texts_in(tools)), field="tools")
        disarm = self._control_tokens.disarm
        disarmed = (
            turn_fields(prompt.messages, disarm),
            tool_fields(prompt.tools, disarm),
            {name: changed(value, disarm) for name, value in options.items()},
        )
        is_suspicious = disarmed != (turns, tools, options)
        turns, tools, options = disarmed
        rendered = self._template.render(turns, tools, replace(prompt, template_options=options))
        if is_suspicious:
            token_ids = self._control_tokens.encode(rendered)
        else:
            token_ids = self._encode(rendered, has_special_tokens=False)
        if not token_ids:
            raise RequestError("messages render to an empty prompt", field="messages")
        return token_ids

    def encode_text(self, text: str, *, has_special_tokens: bool = True) -> list[int]:
        """Return the token ids of raw text, with or without the special tokens that the tokenizer adds around it.

        Raises:
            RequestError: the text is too long or is not Unicode.
        """
        self._check([text], field="prompt")
        return self._encode(text, has_special_tokens=has_special_tokens)

    def encode_between(self, prefix: str, suffix: str) -> list[int]:
        """Return the token ids of a prompt whose answer fills in what is between two texts.

        Raises:
            RequestError: the tokenizer has no marks for it, or a text is too long or not Unicode.
        """
        forms = (
            form for form in MIDDLE_FORMS if all(self._backend.token_to_id(mark) is not None for mark in form[::2])
        )
        form = next(forms, None)
        if form is None:
            raise RequestError("this model cannot fill in text: its tokenizer has no marks for it", field="suffix")
        self._check([prefix, suffix], field="prompt")
        texts = {PREFIX: prefix, SUFFIX: suffix}
        return self._encode("".join(texts.get(part, part) for part in form), has_special_tokens=True)

    def breakers(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token id sequences of DRY sequence breakers: repeats do not extend across them.

        These are every single token that contains one of the strings, and the multi-token encodings of a string at the
        start of a text and after a space. May scan the whole vocabulary.
        """
        found: dict[tuple[int, ...], None] = {}
        for text in texts:
            found |= dict.fromkeys((token_id,) for token_id in self.pieces.spellings.containing(text.encode()))
            found |= dict.fromkeys(word for word in self.encode_word(text) if len(word) > 1)
        return tuple(found)

    def encode_word(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Return the distinct encodings of a word at the start of a text and after a space."""
        spellings = (self._backend.encode(text, add_special_tokens=False).ids for text in (word, f" {word}"))
        return tuple(dict.fromkeys(tuple(token_ids) for token_ids in spellings if token_ids))

    def _encode(self, text: str, *, has_special_tokens: bool) -> list[int]:
        # Only the batch call can skip token offsets, which are not needed here and take a fifth of the time.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=has_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def _check(self, texts: Sequence[str], *, field: str) -> None:
        num_chars = sum(map(len, texts))
        if num_chars > self._max_chars:
            raise RequestError(
                f"{field} must have at most {self._max_chars} characters, got {num_chars}",
                field=field,
                code="context_length_exceeded",
            )
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                # Not chained: the error quotes the text.
                raise RequestError(f"{field} must be valid Unicode, and holds a lone surrogate", field=field) from None


def _files_digest(folder: Path) -> bytes:
    """Return a digest of tokenizer.json and the files that name special tokens."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*token*.json")):
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.digest()
