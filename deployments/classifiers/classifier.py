"""Classifies texts with a sequence-classification checkpoint: a probability per hazard, and the flagged hazards.

Takes any `AutoModelForSequenceClassification` folder with safetensors; multi-label models use a sigmoid, single-label
models a softmax. A long text is judged in overlapping windows, and each label gets its highest score. Blocking: call in
a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from deployments.answer_events import Verdict
from deployments.classifiers.sequence_checkpoint import SequenceCheckpoint
from deployments.classifiers.sequence_window import CHARS_PER_TOKEN, check_labels, check_problem
from deployments.config import SafetyConfig
from engine.errors import RequestError

MAX_OVERLAP_TOKENS = 64
PADDING_SLACK_TOKENS = 32
"""Rows that differ by less share a forward pass: padding them costs less than another pass."""


class Classifier:
    """One checkpoint in memory, on the CPU.

    Raises:
        CheckpointError: the folder has no complete safetensors checkpoint of a classifier of probabilities.
        ConfigError: the configuration names a label that the classifier does not have.
    """

    def __init__(self, config: SafetyConfig) -> None:
        self._config = config
        self._checkpoint = SequenceCheckpoint(config.model_path, num_threads=config.num_threads, dtype=config.dtype)
        check_problem(config.model_path)
        self._labels = self._checkpoint.labels
        self._is_multi_label = _is_multi_label(self._checkpoint)
        check_labels(config, self._labels)
        # A checkpoint may read 8192 tokens at once: minutes on a CPU, in which nothing else is judged.
        self._window_tokens = min(self._checkpoint.window_tokens, config.max_tokens)
        self._overlap_tokens = min(MAX_OVERLAP_TOKENS, self._window_tokens // 4)

    @property
    def hazards(self) -> tuple[str, ...]:
        """The labels that verdicts score: all except benign ones."""
        return tuple(label for label in self._labels if label not in self._config.benign_labels)

    def check(self, text: str, *, field: str) -> None:
        """Refuse a text that cannot be judged, before it is batched with others; `field` names it.

        Raises:
            RequestError: the text is longer than `SafetyConfig.max_chars`, or contains a lone surrogate.
        """
        if len(text) > self._config.max_chars:
            raise RequestError.about(
                field, f"must have at most {self._config.max_chars} characters to be judged, got {len(text)}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError.about(field, "must be valid Unicode, and holds a lone surrogate") from None

    def pieces(self, text: str) -> list[str]:
        """Return overlapping pieces of a text, each of about a window, that can be judged in separate calls."""
        length = CHARS_PER_TOKEN * self._window_tokens
        step = length - CHARS_PER_TOKEN * self._overlap_tokens
        starts = range(0, max(1, len(text) - length + step), step)
        return [text[start : start + length] for start in starts]

    def judge(self, texts: Sequence[str]) -> list[Verdict]:
        """Return a verdict on each text, in order. A forward pass takes at most `SafetyConfig.max_batch` windows.

        Each text must have passed `check`.
        """
        if not texts:
            return []
        windows, owners = self._checkpoint.tokenizer.windows(texts, self._window_tokens, self._overlap_tokens)
        worst = torch.zeros(len(texts), len(self._labels))  # [texts, labels]
        for chosen in self._passes([len(window["input_ids"]) for window in windows]):
            logits = self._checkpoint.logits([windows[i] for i in chosen])
            scores = logits.sigmoid() if self._is_multi_label else logits.softmax(dim=-1)  # [chosen, labels]
            for row, window in enumerate(chosen):
                worst[owners[window]] = torch.maximum(worst[owners[window]], scores[row])
        return [self._verdict(dict(zip(self._labels, row, strict=True))) for row in worst.tolist()]

    def _passes(self, num_tokens: Sequence[int]) -> Iterator[list[int]]:
        """Yield the rows of each forward pass, of similar lengths because short rows are padded to the longest."""
        # A text without tokens has nothing to judge.
        left = deque(sorted((row for row, count in enumerate(num_tokens) if count), key=num_tokens.__getitem__))
        while left:
            limit = 2 * num_tokens[left[0]] + PADDING_SLACK_TOKENS
            chosen: list[int] = []
            while left and len(chosen) < self._config.max_batch and num_tokens[left[0]] <= limit:
                chosen.append(left.popleft())
            yield chosen

    def _verdict(self, score_by_label: Mapping[str, float]) -> Verdict:
        score_by_hazard = {hazard: score_by_label[hazard] for hazard in self.hazards}
        bounds = self._config.threshold_by_hazard
        flagged = tuple(
            hazard for hazard, score in score_by_hazard.items() if score >= bounds.get(hazard, self._config.threshold)
        )
        return Verdict(score_by_hazard=score_by_hazard, flagged=flagged)


def _is_multi_label(checkpoint: SequenceCheckpoint) -> bool:
    if checkpoint.problem_type is None:
        # A single logit only makes sense with a sigmoid.
        return len(checkpoint.labels) == 1
    return checkpoint.problem_type == "multi_label_classification"
