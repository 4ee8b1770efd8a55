"""A request's edits of its logits, made before anything else: logit bias, allowed tokens, bad words."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.request import SamplingParams
from engine.sampling.masks import Bits, packed


@dataclass(slots=True, kw_only=True)
class LogitEdits:
    """The edits of one row; `note` must be called with each of its tokens.

    Attributes:
        biased_ids, biases: distinct token ids and what is added to their logits, int64 and float64 [n].
        allowed: the mask of the tokens that may come at all, or None.
        bad_words: sequences of at least two tokens; the last is forbidden directly after the others.
        recent: the newest output tokens, as many as the longest bad word needs.
    """

    biased_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float64]
    allowed: Bits | None
    bad_words: tuple[tuple[int, ...], ...]
    recent: deque[int]

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int, output_ids: Sequence[int]) -> LogitEdits | None:
        """Return the edits that a request asks for, None for none."""
        if not (params.logit_bias or params.allowed_token_ids or params.bad_words):
            return None
        # A tokenizer may know more tokens than the model has logits.
        bias_by_id: dict[int, float] = {}
        for token_id, bias in params.logit_bias:
            if token_id < vocab_size:
                bias_by_id[token_id] = bias_by_id.get(token_id, 0.0) + bias
        bad_words = [word for word in params.bad_words if max(word) < vocab_size]
        single = [word[0] for word in bad_words if len(word) == 1]
        longer = tuple(word for word in bad_words if len(word) > 1)
        allowed = None
        if params.allowed_token_ids or single:
            is_allowed = np.full(vocab_size, not params.allowed_token_ids)
            is_allowed[[token_id for token_id in params.allowed_token_ids if token_id < vocab_size]] = True
            is_allowed[single] = False
            allowed = packed(is_allowed)
        return cls(
            biased_ids=np.array([*bias_by_id], dtype=np.int64),
            biases=np.array([*bias_by_id.values()], dtype=np.float64),
            allowed=allowed,
            bad_words=longer,
            recent=deque(output_ids, maxlen=max((len(word) - 1 for word in longer), default=0)),
        )

    def forbidden(self) -> set[int]:
        """Return the tokens that would complete a bad word."""
        recent = tuple(self.recent)
        return {word[-1] for word in self.bad_words if recent[len(recent) - len(word) + 1 :] == word[:-1]}

    def note(self, token_id: int) -> None:
        """Record the chosen token."""
        self.recent.append(token_id)
