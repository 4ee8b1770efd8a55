"""Grammar-constrained answers with llguidance: compiled outside the step, a mask over the vocabulary at every step.

A compiled grammar is copied for each request that follows it. The library's limits bound its cost: a grammar that
exceeds one is in error, and stays so. Copies share one lexer, and an error in it fails all of them. Each copy then
continues with a lexer of its own, so that only the request that exceeds the limit fails.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import GrammarError, RequestError
from engine.sampling.masks import Bits, unpacked

if TYPE_CHECKING:
    # An engine whose requests use no grammar runs without the library.
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 256
NUM_TRIED_TOKENS = 8
"""Tokens of an answer that are tried when a grammar is compiled, besides those that it forces."""
MAX_ITEMS = 20_000
"""Of the parser, for one mask. All requests wait for a mask, and an ambiguous grammar takes time quadratic in these:
some 0.1 s for so many, 0.7 s for the library's 50,000. With 128 K tokens, 100 optional properties need 15,000."""
MIN_ITEMS = 5_000
"""Of the parser, for a small vocabulary: a mask tries all tokens, so larger ones need more."""


class GrammarFollower:
    """One request's state in its grammar; a follower in error allows no token.

    Args:
        matcher: at the grammar's start.
        renew: returns a matcher at the start that shares no lexer.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_ids: Sequence[int],
        output_ids: Sequence[int],
        renew: Callable[[], LLMatcher],
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end = list(eos_ids[:1])
        self._output_ids = list(output_ids)
        self._renew: Callable[[], LLMatcher] | None = renew
        if output_ids:
            matcher.consume_tokens(self._output_ids)
            self._try_renew()

    @property
    def error(self) -> str | None:
        """One sentence if the grammar cannot be followed any further, else None."""
        return _reason(self._matcher) if self._matcher.is_error() else None

    def allowed(self) -> Bits:
        """Return the mask of the tokens that may come next."""
        bits = _bits(self._matcher)
        if self._try_renew():
            bits = _bits(self._matcher)
        # In error, the library would allow the end of the sequence.
        return np.zeros_like(bits) if self._matcher.is_error() else bits

    def note(self, token_id: int) -> None:
        """Record the chosen token."""
        self._matcher.consume_token(token_id)
        self._output_ids.append(token_id)
        self._try_renew()

    def take_forced(self) -> list[int]:
        """Record and return the forced tokens: those that come next because the grammar allows no other.

        They are what `allowed` would leave one by one. If the grammar has ended, the first end-of-sequence token
        follows them; it is never shown.
        """
        forced = self._consume_forced()
        if self._try_renew():
            forced = self._consume_forced()
        self._output_ids += forced
        has_ended = self._matcher.is_stopped() and not self._matcher.is_error()
        return forced + self._end if has_ended else forced

    def _consume_forced(self) -> list[int]:
        # A tokenizer may have tokens that the model lacks: from such a token on, tokens are drawn.
        forced = list(takewhile(lambda token_id: token_id < self._vocab_size, self._matcher.compute_ff_tokens()))
        # Forced tokens should always be allowed; one that is not is left to be drawn, which fails with the reason.
        return forced[: self._matcher.try_consume_tokens(forced)]

    def _try_renew(self) -> bool:
        """Continue once with a private lexer if the matcher is in error: another request may have failed the lexer."""
        if self._renew is None or not self._matcher.is_error():
            return False
        self._matcher, self._renew = self._renew(), None
        self._matcher.consume_tokens(self._output_ids)
        return True


class GrammarStore:
    """The grammars of one model. `compile` may be called on any thread, `follow` on the engine's only.

    Args:
        tokenizer_path: folder with tokenizer.json, which is read for the first grammar.
        vocab_size: of the logits; may exceed the tokenizer's, or be smaller by tokens that were added to the tokenizer.
    """

    def __init__(self, tokenizer_path: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._file = Path(tokenizer_path) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> None:
        """Compile a grammar and keep it for `follow`.

        Raises:
            GrammarError: it is invalid, or exceeds the fuel limit; or the model has no token that ends an answer.
            RequestError: this model has no tokenizer that grammars can be used with.
        """
        if not self._eos_ids:
            raise GrammarError("the model has no token that ends an answer")
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))

    def follow(self, grammar: str, output_ids: Sequence[int]) -> GrammarFollower:
        """Return a follower of a grammar, after the tokens that have been generated already; it may be in error.

        Raises:
            RequestError: the model has no tokenizer that grammars can be used with, so none was ever compiled.
        """
        shared = self._matcher(grammar)
        renew = partial(self._renewed, grammar, shared)
        return GrammarFollower(shared.deep_copy(), self._vocab_size, self._eos_ids, output_ids, renew)

    def _renewed(self, grammar: str, failed: LLMatcher) -> LLMatcher:
        """Return a matcher that shares nothing, and drop the failed one from the store."""
        with self._lock:
            if self._compiled.get(grammar) is failed:
                del self._compiled[grammar]
        assert self._tokenizer is not None
        matcher = _limited(self._tokenizer, grammar)
        # The fuel limit takes effect with the first mask.
        matcher.compute_bitmask()
        return matcher

    def _matcher(self, grammar: str) -> LLMatcher:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            tokenizer = self._tokenizer = self._tokenizer or self._read_tokenizer()
        matcher = self._tried(_limited(tokenizer, grammar))
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _tried(self, matcher: LLMatcher) -> LLMatcher:
        """Return the matcher, or a copy in error: a grammar may exceed its limits only once it is followed."""
        trial = matcher.deep_copy()
        for _ in range(NUM_TRIED_TOKENS):
            allowed = unpacked(_bits(trial), self._vocab_size)
            allowed[self._eos_ids] = False
            if trial.is_error() or not allowed.any():
                break
            trial.consume_token(int(allowed.argmax()))
            trial.try_consume_tokens(trial.compute_ff_tokens())
        return trial if trial.is_error() else matcher

    def _read_tokenizer(self) -> LLTokenizer:
        from engine.sampling.grammar_tokenizer import read_tokenizer

        try:
            return read_tokenizer(self._file.read_text(encoding="utf-8"), self._vocab_size, self._eos_ids)
        except (OSError, ValueError) as error:
            raise RequestError(f"This model cannot follow grammars: {error}") from None


def _limited(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the grammar's start, in error if it is invalid."""
    from llguidance import LLMatcher, LLParserLimits

    max_items = min(MAX_ITEMS, MIN_ITEMS + tokenizer.vocab_size // 8)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(step_max_items=max_items))


def _bits(matcher: LLMatcher) -> Bits:
    """Return the mask of the tokens that may come next; of a matcher that is or gets in error, of those that end."""
    return np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)


def _reason(matcher: LLMatcher) -> str:
    # Cut off the dump of the library's state.
    reason = matcher.get_error().split("\n<state>", 1)[0].strip().splitlines()[0][:300]
    return "It leaves nothing that may come next." if reason == "NoExtensionBias" else reason
