"""A sequence-classification checkpoint in memory: texts or pairs of texts to rows of token ids, rows to logits.

Any `AutoModelForSequenceClassification` folder with safetensors. Blocks: to be called in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoTokenizer

from deployments.classifiers import modern_bert
from deployments.classifiers.sequence_window import window_of
from engine.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Rows = Mapping[str, list[list[int]]]
"""What a tokenizer returns for several texts, unpadded: `input_ids` and what else the model reads."""

_Network = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Padded inputs to logits [rows, labels]."""


class SequenceCheckpoint:
    """One checkpoint, float32, on the CPU.

    Attributes:
        config: what config.json says.
        labels: names of the logits, in order.
        window_tokens: tokens that it reads at once.

    Raises:
        CheckpointError: the folder has no whole safetensors checkpoint of a classifier.
    """

    def __init__(self, path: str, *, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.config = _load_config(path)
        self._network = _load_network(path, self.config)
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

    @torch.inference_mode()
    def logits(self, rows: Rows) -> torch.Tensor:
        """Return logits [rows, labels] float32 of one forward pass.

        Raises:
            RuntimeError: they are not finite.
        """
        inputs = self.tokenizer.pad(dict(rows), return_tensors="pt")
        logits = self._network(inputs)
        if not bool(torch.isfinite(logits).all()):
            # A NaN compares as harmless: better no answer than a wrong one.
            raise RuntimeError("the classifier's logits are not finite")
        return logits


def _load_config(path: str) -> PretrainedConfig:
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: there is no such folder")
    if not any(name.endswith(".safetensors") for name in os.listdir(path)):
        raise CheckpointError(f"{path}: there is no safetensors file, the only format that is read")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: not a classifier's checkpoint: {error}") from error


def _load_network(path: str, config: PretrainedConfig) -> _Network:
    if modern_bert.is_known(path, config):
        classifier = modern_bert.load(path, config)
        return lambda inputs: classifier.logits(inputs["input_ids"], inputs["attention_mask"])
    model = _load_any(path)
    return lambda inputs: model(**inputs).logits


def _load_any(path: str) -> Callable[..., Any]:
    # A tenth of a gigabyte of modules: generation, compilers, distribution.
    from transformers import AutoModelForSequenceClassification

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
    modern_bert.check_whole(path, [str(name) for kind in ("missing_keys", "mismatched_keys") for name in report[kind]])
    found: Callable[..., Any] = model.eval()
    return found
