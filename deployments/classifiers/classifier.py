"""Classifies texts with a sequence-classification checkpoint: a probability per hazard, and the flagged hazards.

Takes any `AutoModelForSequenceClassification` folder with safetensors; multi-label models use a sigmoid, single-label
models a softmax. A text longer than the model's window is judged in overlapping windows, and each label gets its
highest score. Blocking: call in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from deployments.classifiers.sequence_checkpoint import SequenceCheckpoint
from deployments.classifiers.sequence_tokenizer import Rows
from deployments.classifiers.sequence_window import check_labels
from deployments.config import SafetyConfig
from deployments.generation import Verdict
from engine.errors import RequestError

MAX_OVERLAP_TOKENS = 64


class Classifier:
    """One checkpoint in memory, on the CPU.

    Raises:
        CheckpointError: the folder has no complete safetensors checkpoint of a classifier.
        ConfigError: the configuration names a label that the classifier does not have.
    """

    def __init__(self, config: SafetyConfig) -> None:
        self._config = config
        self._checkpoint = SequenceCheckpoint(config.model_path, num_threads=config.num_threads, dtype=config.dtype)
        self._labels = self._checkpoint.labels
        self._is_multi_label = _is_multi_label(self._checkpoint)
        check_labels(config, self._labels)

    @property
    def hazards(self) -> tuple[str, ...]:
        """The labels that verdicts score: all except benign ones."""
        return tuple(label for label in self._labels if label not in self._config.benign_labels)

    def check(self, text: str) -> None:
        """Refuse a text that cannot be judged, before it is batched with others.

        Raises:
            RequestError: the text is longer than `SafetyConfig.max_chars`, or contains a lone surrogate.
        """
        if len(text) > self._config.max_chars:
            raise RequestError(
                f"input must have at most {self._config.max_chars} characters to be judged, got {len(text)}",
                field="input",
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("input must be valid Unicode, and holds a lone surrogate", field="input") from None

    def judge(self, texts: Sequence[str]) -> list[Verdict]:
        """Return a verdict on each text, in order. A forward pass takes at most `SafetyConfig.max_batch` windows.

        Each text must have passed `check`.
        """
        if not texts:
            return []
        window_tokens = self._checkpoint.window_tokens
        overlap = min(MAX_OVERLAP_TOKENS, window_tokens // 4)
        windows, owners = self._checkpoint.tokenizer.windows(texts, window_tokens, overlap)
        worst = torch.zeros(len(texts), len(self._labels))  # [texts, labels]
        # Batching windows of similar length saves padding. A text without tokens has nothing to judge.
        num_tokens = [len(ids) for ids in windows["input_ids"]]
        order = sorted((i for i in range(len(owners)) if num_tokens[i]), key=num_tokens.__getitem__)
        for start in range(0, len(order), self._config.max_batch):
            chosen = order[start : start + self._config.max_batch]
            batch = {name: [rows[i] for i in chosen] for name, rows in windows.items()}
            scores = self._forward(batch)
            for row, window in enumerate(chosen):
                worst[owners[window]] = torch.maximum(worst[owners[window]], scores[row])
        return [self._verdict(dict(zip(self._labels, row, strict=True))) for row in worst.tolist()]

    @torch.inference_mode()
    def _forward(self, batch: Rows) -> torch.Tensor:
        """Return the probabilities [windows, labels] of a batch of unpadded rows."""
        logits = self._checkpoint.logits(batch)
        return logits.sigmoid() if self._is_multi_label else logits.softmax(dim=-1)

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
