"""Logits of rows that share a call against those of each row alone in transformers, over architectures and paddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    ConvBertConfig,
    FNetConfig,
    MobileBertConfig,
    ModernBertConfig,
    MPNetConfig,
    NystromformerConfig,
    PretrainedConfig,
    Qwen3Config,
    XLNetConfig,
)

from deployments.classifiers.sequence_checkpoint import SequenceCheckpoint
from engine.errors import CheckpointError
from tests.deployments.tiny_models import CONTEXT, write_tokenizer

PAD, OTHER = 1, 3
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
FORMS: dict[str, Callable[[int], PretrainedConfig]] = {
    "bert": lambda size: BertConfig(vocab_size=size, **SIZES),
    "modernbert": lambda size: ModernBertConfig(vocab_size=size, pad_token_id=PAD, local_attention=8, **SIZES),
    "convbert": lambda size: ConvBertConfig(vocab_size=size, embedding_size=16, **SIZES),
    "fnet": lambda size: FNetConfig(vocab_size=size, **{k: v for k, v in SIZES.items() if k != "num_attention_heads"}),
    "mobilebert": lambda size: MobileBertConfig(
        vocab_size=size, embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16, **SIZES
    ),
    "xlnet": lambda size: XLNetConfig(vocab_size=size, d_model=16, d_inner=24, n_layer=2, n_head=2),
    "qwen3": lambda size: Qwen3Config(vocab_size=size, pad_token_id=PAD, head_dim=8, num_key_value_heads=1, **SIZES),
    "qwen3 without padding": lambda size: Qwen3Config(vocab_size=size, head_dim=8, num_key_value_heads=1, **SIZES),
    "qwen3 with another padding": lambda size: Qwen3Config(
        vocab_size=size, pad_token_id=OTHER, head_dim=8, num_key_value_heads=1, **SIZES
    ),
}


def written(folder: Path, form: Callable[[int], PretrainedConfig], **settings: object) -> Path:
    config = form(write_tokenizer(folder))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    torch.manual_seed(1)
    config.num_labels = 3
    model = AutoModelForSequenceClassification.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_logits_that_it_has_alone(name: str, side: str, tmp_path: Path) -> None:
    """A padding that counted moved the scores of a text by those of other texts in its call, or failed the call."""
    folder = written(tmp_path, FORMS[name], padding_side=side)
    checkpoint = SequenceCheckpoint(str(folder), num_threads=1, dtype="float32")
    texts = ["Return it.", "Return the current working directory, or the one above.", "a b c d e f g"]
    rows, _ = checkpoint.tokenizer.windows(texts, checkpoint.window_tokens, 0)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        wanted = [model(input_ids=tokenizer(text, return_tensors="pt").input_ids).logits for text in texts]
    torch.testing.assert_close(checkpoint.logits(rows), torch.cat(wanted), rtol=0, atol=1e-5)


def test_a_text_fills_the_positions_of_a_model_that_counts_them_from_the_padding_token(tmp_path: Path) -> None:
    folder = written(tmp_path, lambda size: MPNetConfig(vocab_size=size, **SIZES), model_max_length=10**30)
    checkpoint = SequenceCheckpoint(str(folder), num_threads=1, dtype="float32")
    assert checkpoint.window_tokens == CONTEXT - 2
    rows, _ = checkpoint.tokenizer.windows(["x " * 2 * CONTEXT], checkpoint.window_tokens, 0)
    assert checkpoint.logits(rows).shape[1] == 3


def test_what_cannot_be_computed_is_refused_at_once(tmp_path: Path) -> None:
    form = NystromformerConfig(vocab_size=300, segment_means_seq_len=64, num_landmarks=8, **SIZES)
    with pytest.raises(CheckpointError, match="cannot be computed"):
        SequenceCheckpoint(str(written(tmp_path, lambda size: form)), num_threads=1, dtype="float32")
