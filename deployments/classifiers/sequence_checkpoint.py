"""A sequence-classification checkpoint in memory: texts or text pairs to rows of token ids, and rows to logits.

Takes any `AutoModelForSequenceClassification` folder with safetensors. However the tokenizer was loaded, the
`tokenizers` library does the work; rows are truncated and padded as in transformers. Blocking: call in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from tokenizers import Encoding

from deployments.classifiers import modern_bert
from deployments.classifiers.sequence_window import window_of
from deployments.tokenizer.tokenizer_folder import load_tokenizer
from engine.errors import CheckpointError, EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Row = Mapping[str, list[int]]
"""An unpadded row by input name: `input_ids` and any other inputs of the model."""


class SequenceTokenizer:
    """The tokenizer of one checkpoint; for one thread.

    Attributes:
        max_tokens: per row, 10^30 if unspecified.

    Raises:
        CheckpointError: the folder has no fast tokenizer, or its tokenizer has no padding token.
    """

    def __init__(self, folder: str) -> None:
        self._loaded = load_tokenizer(folder)
        self._backend = self._loaded.backend
        self.max_tokens = self._loaded.max_tokens
        self._backend.no_padding()
        pad_id: int | None = self._backend.token_to_id(self._loaded.special_tokens.get("pad_token", ""))
        if pad_id is None:
            raise CheckpointError(f"{folder}: the tokenizer names no padding token")
        self._padding_by_name = {"input_ids": pad_id, "token_type_ids": self._loaded.pad_type_id, "attention_mask": 0}

    def num_special_in_pair(self) -> int:
        """Return the number of special tokens added to a pair."""
        count: int = self._backend.num_special_tokens_to_add(True)
        return count

    def windows(self, texts: Sequence[str], max_tokens: int, overlap: int) -> tuple[list[Row], list[int]]:
        """Return rows of at most `max_tokens` that cover the texts, and the index of each row's text.

        Consecutive rows of one text overlap by `overlap` tokens.

        Raises:
            TypeError: a text contains a lone surrogate.
        """
        self._cut_to(max_tokens, overlap)
        found = self._backend.encode_batch(list(texts))
        parts = [(self._row(part), i) for i, whole in enumerate(found) for part in (whole, *whole.overflowing)]
        return [row for row, _ in parts], [i for _, i in parts]

    def pair(self, first: str, second: str, max_tokens: int | None) -> Row:
        """Return the row of two texts, truncated to `max_tokens` in total if given, taking from the longer text first.

        Raises:
            TypeError: a text contains a lone surrogate.
        """
        if max_tokens is None:
            self._backend.no_truncation()
        else:
            self._cut_to(max_tokens, 0)
        # As in transformers, an empty second text counts as absent.
        return self._row(self._backend.encode(first, second or None))

    def padded(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Return the rows as tensors [rows, tokens], padded to the longest row.

        Always on the right, whatever side the tokenizer names: on the left, padding would shift the positions of
        tokens and take the place of the first one, which encoders classify by.
        """
        longest = max(len(row["input_ids"]) for row in rows)
        return {
            name: torch.tensor([row[name] + [padding] * (longest - len(row[name])) for row in rows])
            for name, padding in self._padding_by_name.items()
            if name in rows[0]
        }

    def _cut_to(self, max_tokens: int, overlap: int) -> None:
        self._backend.enable_truncation(
            max_tokens, stride=overlap, strategy="longest_first", direction=self._loaded.truncation_side
        )

    def _row(self, encoding: Encoding) -> Row:
        others = {"token_type_ids": encoding.type_ids, "attention_mask": encoding.attention_mask}
        return {"input_ids": encoding.ids} | {name: others[name] for name in others if name in self._loaded.input_names}


_Network = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Padded inputs to logits [rows, labels]."""
PROBES = ("The first text.", "A text of a few more words than the first one.", "This text is the longest. " * 3)
TOLERANCE_BY_DTYPE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""How much the logits of one text may differ between passes; padding that counts changes them by more."""


class SequenceCheckpoint:
    """One checkpoint in a dtype to compute in ("float32" or "bfloat16"), on the CPU.

    Attributes:
        labels: names of the logits, in order.
        problem_type: the field of config.json, None if absent.
        window_tokens: maximum tokens per row.

    Raises:
        CheckpointError: the folder has no complete safetensors checkpoint of a classifier.
    """

    def __init__(self, path: str, *, num_threads: int, dtype: str) -> None:
        torch.set_num_threads(num_threads)
        computed_in: torch.dtype = getattr(torch, dtype)
        _check_folder(path)
        spec = modern_bert.read_spec(path)
        if spec is not None:
            classifier = modern_bert.load(path, spec, computed_in)
            self._network: _Network = lambda inputs: classifier.logits(inputs["input_ids"], inputs["attention_mask"])
            self.labels, self.problem_type = list(spec.labels), spec.problem_type
            told: tuple[str, int | None, int | None] = modern_bert.MODEL_TYPE, spec.max_position_embeddings, None
        else:
            model = _load_any(path, computed_in)
            config = model.config
            self._network = lambda inputs: model(**inputs).logits
            self.labels = [config.id2label[i] for i in range(config.num_labels)]
            self.problem_type = config.problem_type
            told = config.model_type, getattr(config, "max_position_embeddings", None), config.pad_token_id
        self.tokenizer = SequenceTokenizer(path)
        self.window_tokens = window_of(*told, self.tokenizer.max_tokens)
        # Our own code never lets padding count.
        self._shares_passes = spec is not None or self._is_padding_ignored(path, computed_in)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the float32 logits [rows, labels]: of one forward pass, or of one per row if padding would count.

        Raises:
            EngineError: a logit is not finite.
        """
        logits = self._together(rows) if self._shares_passes else self._one_by_one(rows)
        if not bool(torch.isfinite(logits).all()):
            # NaN would compare as harmless: better no answer than a wrong one.
            raise EngineError("The classifier's logits are not finite.")
        return logits

    def _together(self, rows: Sequence[Row]) -> torch.Tensor:
        return self._network(self.tokenizer.padded(rows)).float()

    def _one_by_one(self, rows: Sequence[Row]) -> torch.Tensor:
        return torch.cat([self._together([row]) for row in rows])

    @torch.inference_mode()
    def _is_padding_ignored(self, path: str, dtype: torch.dtype) -> bool:
        """Whether rows of different lengths get the logits in one padded pass that each gets alone.

        Some encoders mix padding in despite the mask (ConvBERT, FNet, MobileBERT, XLNet). Decoders find the last token
        by the padding token of config.json, which may be absent or another one than the tokenizer's.

        Raises:
            CheckpointError: the model cannot be computed at all.
        """
        probes, _ = self.tokenizer.windows(PROBES, self.window_tokens, 0)
        rows = [row for row in probes if row["input_ids"]]
        if not rows:
            return False
        try:
            alone = self._one_by_one(rows)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise CheckpointError(f"{path}: the classifier cannot be computed in {dtype}: {error}") from error
        try:
            return torch.allclose(self._together(rows), alone, rtol=0.01, atol=TOLERANCE_BY_DTYPE[dtype])
        except (RuntimeError, ValueError, IndexError):
            # Only one row at a time is accepted, or the padding token has no embedding.
            return False


def _check_folder(path: str) -> None:
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: there is no such folder")
    if not any(name.endswith(".safetensors") for name in os.listdir(path)):
        raise CheckpointError(f"{path}: there is no safetensors file, the only format that is read")


def _load_any(path: str, dtype: torch.dtype) -> PreTrainedModel:
    # Imported lazily: it costs a second, and 0.1 GB of modules for generation, compilers and distributed execution,
    # which ModernBERT checkpoints, computed in this package, avoid.
    from transformers import AutoModelForSequenceClassification

    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
        )
    except Exception as error:
        # Of many kinds: a field of another type, a library that a quantization needs, a file that is cut off.
        raise CheckpointError(f"{path}: not a classifier's checkpoint: {error}") from error
    # Otherwise a missing head would be initialized at random and judge at random.
    modern_bert.check_whole(path, [str(name) for kind in ("missing_keys", "mismatched_keys") for name in report[kind]])
    whole: PreTrainedModel = model.eval()
    return whole
