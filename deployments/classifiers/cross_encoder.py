"""Scores how well a document answers a query with a cross-encoder, which reads both together as one row.

The score is the sigmoid of the single logit, 0 to 1 (Nogueira and Cho, 2019, arXiv 1901.04085, section 3). Blocking:
call in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.classifiers.sequence_checkpoint import Row, SequenceCheckpoint
from deployments.config import RerankerConfig
from deployments.pooled import Pair, PairScore
from engine.errors import CheckpointError, RequestError


class CrossEncoder:
    """One checkpoint in memory, on the CPU.

    Raises:
        CheckpointError: the folder has no complete safetensors checkpoint with exactly one label.
    """

    def __init__(self, config: RerankerConfig) -> None:
        self._config = config
        self._checkpoint = SequenceCheckpoint(config.model_path, num_threads=config.num_threads, dtype=config.dtype)
        if len(self._checkpoint.labels) != 1:
            raise CheckpointError(
                f"{config.model_path}: a cross-encoder has one label, and this one {len(self._checkpoint.labels)}"
            )
        self._window_tokens = min(self._checkpoint.window_tokens, config.max_tokens)

    def score(self, pairs: Sequence[Pair]) -> list[PairScore | RequestError]:
        """Return each pair's score, or the error that prevents one, in order. Runs one forward pass.

        Errors are returned, not raised, because a call may hold pairs of several requests.
        """
        found = [self._row(pair) for pair in pairs]
        rows = [row for row in found if not isinstance(row, RequestError)]
        scores = iter(self._checkpoint.logits(rows)[:, 0].sigmoid().tolist() if rows else ())
        return [
            row if isinstance(row, RequestError) else PairScore(next(scores), len(row["input_ids"])) for row in found
        ]

    def _row(self, pair: Pair) -> Row | RequestError:
        longest = max(len(pair.query), len(pair.document))
        if longest > self._config.max_chars:
            return RequestError.about(
                pair.field, f"and its query may have {self._config.max_chars} characters each; one has {longest}."
            )
        asked, window = pair.max_tokens, self._window_tokens
        least = self._checkpoint.tokenizer.num_special_in_pair() + 1
        if asked is not None and not least <= asked <= window:
            return RequestError.about(
                "truncate_prompt_tokens", f"is {asked}; from {least} to {window} are allowed with this model."
            )
        try:
            row = self._checkpoint.tokenizer.pair(pair.query, pair.document, asked or None)
        except (TypeError, UnicodeEncodeError):
            return RequestError.about(pair.field, "or its query holds a lone surrogate.")
        num_tokens = len(row["input_ids"])
        if num_tokens > window:
            return RequestError.about(
                pair.field,
                f"and its query have {num_tokens} tokens together; this model reads at most {window}. Set "
                "'truncate_prompt_tokens' to have them cut.",
                code="context_length_exceeded",
            )
        if not num_tokens:
            return RequestError.about(pair.field, "and its query have no tokens; at least 1 is needed.")
        return row
