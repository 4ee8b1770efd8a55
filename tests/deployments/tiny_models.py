"""Checkpoints of a few kilobytes with random weights: real files for the real loaders, made in a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

CONTEXT = 256
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def write_tokenizer(folder: Path, *, marks: Sequence[str] = (), template: str = TEMPLATE) -> int:
    """Write a byte-level BPE with a chat template, and more special tokens; return the size of its vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(dict.fromkeys((*_SPECIAL, *marks))),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["Return the current working directory."] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "chat_template": template,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def write_chat_model(folder: Path, *, seed: int = 0, marks: Sequence[str] = (), template: str = TEMPLATE) -> Path:
    """Write a Llama of two layers."""
    vocab_size = write_tokenizer(folder, marks=marks, template=template)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def bert_config(folder: Path, **options: Any) -> BertConfig:
    """Write a tokenizer, and return the configuration of a small encoder for it; its weights come from one seed."""
    vocab_size = write_tokenizer(folder)
    torch.manual_seed(0)
    return BertConfig(
        vocab_size=vocab_size, hidden_size=16, num_attention_heads=2, max_position_embeddings=CONTEXT, **options
    )


def write_guard(folder: Path) -> Path:
    """Write a classifier of one layer that finds nothing in anything."""
    labels = {0: "violent_crimes", 1: "hate"}
    config = bert_config(
        folder,
        intermediate_size=16,
        num_hidden_layers=1,
        id2label=labels,
        label2id={label: index for index, label in labels.items()},
        problem_type="multi_label_classification",
    )
    model = BertForSequenceClassification(config)
    torch.nn.init.constant_(model.classifier.bias, -10.0)
    model.save_pretrained(folder)
    return folder


def write_cross_encoder(folder: Path) -> Path:
    """Write a cross-encoder of two layers, whose scores differ from pair to pair."""
    config = bert_config(folder, intermediate_size=32, num_hidden_layers=2, num_labels=1, initializer_range=0.5)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder
