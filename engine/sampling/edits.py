"""A request's edits of its logits, made before anything else: logit bias, allowed tokens, bad words."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.placing import placed
from engine.request import SamplingParams


@dataclass(slots=True, kw_only=True)
class LogitEdits:
    """The edits of one row; `note` must be called with each of its tokens.

    Attributes:
        biased: token ids and their biases, int64 and float32 [n], or None.
        forbidden: bool [vocab], True where a token is never allowed, or None.
        bad_words: sequences of at least two tokens; the last is forbidden directly after the others.
        recent: the newest output tokens, as many as the longest bad word needs.
    """

    biased: tuple[torch.Tensor, torch.Tensor] | None
    forbidden: torch.Tensor | None
    bad_words: tuple[tuple[int, ...], ...]
    recent: deque[int]

    @classmethod
    def of(
        cls, params: SamplingParams, vocab_size: int, output_ids: Sequence[int], device: torch.device
    ) -> LogitEdits | None:
        """Return the edits that a request asks for, None for none."""
        if not (params.logit_bias or params.allowed_token_ids or params.bad_words):
            return None
        # A tokenizer may know more tokens than the model has logits.
        bias = [(token_id, value) for token_id, value in params.logit_bias if token_id < vocab_size]
        allowed = [token_id for token_id in params.allowed_token_ids if token_id < vocab_size]
        bad_words = [word for word in params.bad_words if max(word) < vocab_size]
        biased = None
        if bias:
            ids, values = zip(*bias, strict=True)
            biased = placed(ids, device), placed(values, device, torch.float32)
        single = [word[0] for word in bad_words if len(word) == 1]
        forbidden = None
        if params.allowed_token_ids or single:
            forbidden = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            if params.allowed_token_ids:
                forbidden.fill_(True)
                forbidden.index_fill_(0, placed(allowed, device), False)
            forbidden.index_fill_(0, placed(single, device), True)
        longer = tuple(word for word in bad_words if len(word) > 1)
        recent = deque(output_ids, maxlen=max((len(word) - 1 for word in longer), default=0))
        return cls(biased=biased, forbidden=forbidden, bad_words=longer, recent=recent)

    def apply(self, logits: torch.Tensor) -> None:
        """Edit the logits [vocab] of the next token in place. NaN stays NaN."""
        if self.biased is not None:
            logits.index_add_(0, *self.biased)
        if self.forbidden is not None:
            logits.sub_(torch.where(self.forbidden, torch.inf, 0.0))
        if self.bad_words:
            recent = tuple(self.recent)
            last = [word[-1] for word in self.bad_words if recent[len(recent) - len(word) + 1 :] == word[:-1]]
            if last:
                logits[placed(sorted(set(last)), logits.device)] -= torch.inf

    def note(self, token_id: int) -> None:
        """Record the chosen token."""
        self.recent.append(token_id)
