"""Judges texts by a sequence-classification checkpoint: probability for each hazard, and the hazards over their bound.

Any `AutoModelForSequenceClassification` folder with safetensors: multi-label ones through a sigmoid, single-label ones
through a softmax. A text longer than the model's window is judged in overlapping windows, and counts as its worst one.
Blocks: to be called in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PretrainedConfig, PreTrainedModel

from deployments.config import SafetyConfig
from deployments.generation import Verdict
from engine.errors import CheckpointError, ConfigError, RequestError

MAX_OVERLAP_TOKENS = 64
OFFSET_POSITION_TYPES = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer"})
"""Model types whose positions begin after the padding token's."""
DEFAULT_WINDOW_TOKENS = 512


class Classifier:
    """One checkpoint in memory, float32, on the CPU.

    Raises:
        CheckpointError: the folder has no whole safetensors checkpoint of a classifier.
        ConfigError: the configuration names a label that the classifier does not have.
    """

    def __init__(self, config: SafetyConfig) -> None:
        torch.set_num_threads(config.num_threads)
        self._config = config
        self._model = _load_model(config.model_path)
        self._tokenizer = AutoTokenizer.from_pretrained(
            config.model_path, trust_remote_code=False, local_files_only=True, use_fast=True
        )
        if not self._tokenizer.is_fast:
            raise CheckpointError(f"{config.model_path}: transformers has no fast tokenizer for this checkpoint")
        if self._tokenizer.pad_token is None:
            raise CheckpointError(f"{config.model_path}: the tokenizer names no padding token")
        self._window_tokens = _window_tokens(self._model.config, self._tokenizer.model_max_length)
        self._labels = [self._model.config.id2label[i] for i in range(self._model.config.num_labels)]
        self._is_multi_label = _is_multi_label(self._model.config)
        _check_labels("benign_labels", config.benign_labels, self._labels)
        _check_labels("threshold_by_hazard", tuple(config.threshold_by_hazard), self._labels)

    @property
    def hazards(self) -> tuple[str, ...]:
        """The labels that verdicts score, benign ones left out."""
        return tuple(label for label in self._labels if label not in self._config.benign_labels)

    def check(self, text: str) -> None:
        """Refuse a text that cannot be judged, before it shares a batch with others.

        Raises:
            RequestError: it is longer than `SafetyConfig.max_chars`, or holds a lone surrogate.
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
        """Return a verdict on each text, in order; forward passes take at most `SafetyConfig.max_batch` windows.

        Raises:
            RequestError: as `check`.
        """
        if not texts:
            return []
        for text in texts:
            self.check(text)
        windows = self._tokenizer(
            list(texts),
            truncation=True,
            max_length=self._window_tokens,
            stride=min(MAX_OVERLAP_TOKENS, self._window_tokens // 4),
            return_overflowing_tokens=True,
        )
        owners: list[int] = windows.pop("overflow_to_sample_mapping")
        worst = torch.zeros(len(texts), len(self._labels))  # [texts, labels]
        # Windows of like length share a batch, which saves padding. A text of no token has nothing to judge.
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
    def _forward(self, batch: Mapping[str, list[list[int]]]) -> torch.Tensor:
        """Return probabilities [windows, labels] of a batch of unpadded rows."""
        inputs = self._tokenizer.pad(dict(batch), return_tensors="pt")
        logits: torch.Tensor = self._model(**inputs).logits
        if not bool(torch.isfinite(logits).all()):
            # A NaN compares as harmless: better no verdict than a wrong one.
            raise RuntimeError("the safety classifier's logits are not finite")
        return logits.sigmoid() if self._is_multi_label else logits.softmax(dim=-1)

    def _verdict(self, score_by_label: Mapping[str, float]) -> Verdict:
        score_by_hazard = {hazard: score_by_label[hazard] for hazard in self.hazards}
        bounds = self._config.threshold_by_hazard
        flagged = tuple(
            hazard for hazard, score in score_by_hazard.items() if score >= bounds.get(hazard, self._config.threshold)
        )
        return Verdict(score_by_hazard=score_by_hazard, flagged=flagged)


def _load_model(path: str) -> PreTrainedModel:
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: there is no such folder")
    if not any(name.endswith(".safetensors") for name in os.listdir(path)):
        raise CheckpointError(f"{path}: there is no safetensors file, the only format that is read")
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not a classifier's checkpoint: {error}") from error
    # Without this, a head that is missing would be drawn at random, and judge at random.
    wrong = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in report[kind])
    if wrong:
        raise CheckpointError(
            f"{path}: the checkpoint lacks {wrong[0]} in the right shape ({len(wrong)} tensors in all)"
        )
    return model.eval()


def _window_tokens(config: PretrainedConfig, tokenizer_bound: int) -> int:
    bound = getattr(config, "max_position_embeddings", None) or DEFAULT_WINDOW_TOKENS
    if config.model_type in OFFSET_POSITION_TYPES:
        bound -= config.pad_token_id + 1
    # A tokenizer that knows no bound says 10^30.
    return int(min(bound, tokenizer_bound))


def _is_multi_label(config: PretrainedConfig) -> bool:
    if config.problem_type is None:
        # One logit can only be a sigmoid's.
        return bool(config.num_labels == 1)
    return bool(config.problem_type == "multi_label_classification")


def _check_labels(field: str, names: Sequence[str], labels: Sequence[str]) -> None:
    unknown = [name for name in names if name not in labels]
    if unknown:
        raise ConfigError(f"safety.{field}: the classifier has no label {unknown[0]!r}; it has {', '.join(labels)}")
