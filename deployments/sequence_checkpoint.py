"""A sequence-classification checkpoint in memory: texts or pairs of texts to rows of token ids, rows to logits.

Any `AutoModelForSequenceClassification` folder with safetensors. Blocks: to be called in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from deployments.sequence_window import window_of
from engine.errors import CheckpointError

Rows = Mapping[str, list[list[int]]]
"""What a tokenizer returns for several texts, unpadded: `input_ids` and what else the model reads."""


class SequenceCheckpoint:
    """One checkpoint, float32, on the CPU.

    Attributes:
        labels: names of the logits, in order.
        window_tokens: tokens that it reads at once.

    Raises:
        CheckpointError: the folder has no whole safetensors checkpoint of a classifier.
    """

    def __init__(self, path: str, *, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = _load_model(path)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True, use_fast=True
        )
        if not self.tokenizer.is_fast:
            raise CheckpointError(f"{path}: transformers has no fast tokenizer for this checkpoint")
        if self.tokenizer.pad_token is None:
            raise CheckpointError(f"{path}: the tokenizer names no padding token")
        config = self.config
        self.window_tokens = window_of(
            config.model_type,
            getattr(config, "max_position_embeddings", None),
            config.pad_token_id,
            self.tokenizer.model_max_length,
        )
        self.labels = [config.id2label[i] for i in range(config.num_labels)]

    @property
    def config(self) -> PretrainedConfig:
        """What config.json says."""
        return self._model.config

    @torch.inference_mode()
    def logits(self, rows: Rows) -> torch.Tensor:
        """Return logits [rows, labels] float32 of one forward pass.

        Raises:
            RuntimeError: they are not finite.
        """
        inputs = self.tokenizer.pad(dict(rows), return_tensors="pt")
        logits: torch.Tensor = self._model(**inputs).logits
        if not bool(torch.isfinite(logits).all()):
            # A NaN compares as harmless: better no answer than a wrong one.
            raise RuntimeError("the classifier's logits are not finite")
        return logits


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
