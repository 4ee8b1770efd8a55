"""Our ModernBERT against transformers' own, on small random checkpoints and on the bundled one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, ModernBertConfig, ModernBertForSequenceClassification

from deployments.classifiers import modern_bert
from deployments.classifiers.modern_bert import read_spec
from engine.errors import CheckpointError
from tests.architecture.source_tree import ROOT

VOCAB, TOKENS = 50, 40


def write(folder: Path, **options: object) -> ModernBertForSequenceClassification:
    torch.manual_seed(5)
    config = ModernBertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        local_attention=8,
        num_labels=3,
        pad_token_id=0,
        initializer_range=0.5,
        **options,
    )
    model = ModernBertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model


def batch() -> dict[str, torch.Tensor]:
    """Rows of very different lengths: padding lies further from the last token than a window is wide."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, VOCAB, (4, TOKENS), generator=generator)
    lengths = torch.tensor([TOKENS, 1, 3, 17])
    attention_mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


@torch.inference_mode()
def assert_same(folder: Path, model: torch.nn.Module) -> None:
    spec = read_spec(str(folder))
    assert spec is not None
    ours = modern_bert.load(str(folder), spec)
    torch.testing.assert_close(ours.logits(**batch()), model(**batch()).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"classifier_pooling": "mean"},
        {"layer_types": ["sliding_attention"] * 4},
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
    ],
)
def test_logits_are_those_of_transformers(options: dict[str, object], tmp_path: Path) -> None:
    model = write(tmp_path, **options)
    assert_same(tmp_path, model)


def test_the_bundled_guard_judges_as_by_transformers() -> None:
    folder = ROOT / "models" / "guard"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert_same(folder, model)


@pytest.mark.parametrize("damage", ["missing", "shape", "truncated"])
def test_a_checkpoint_that_is_not_whole_is_refused(damage: str, tmp_path: Path) -> None:
    write(tmp_path)
    spec = read_spec(str(tmp_path))
    assert spec is not None
    path, name = tmp_path / "model.safetensors", "model.layers.1.attn.Wo.weight"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        tensors = load_file(path)
        tensors |= {name: torch.zeros(3, 3)}
        if damage == "missing":
            del tensors[name]
        save_file(tensors, path)
    with pytest.raises(CheckpointError, match=str(tmp_path) if damage == "truncated" else name):
        modern_bert.load(str(tmp_path), spec)


PROBE = """
import json, sys
from deployments.classifiers.classifier import Classifier
from deployments.config import SafetyConfig
Classifier(SafetyConfig(model_path=sys.argv[1])).judge(["Hello."])
print(json.dumps(sorted({"transformers", "torch._dynamo", "sympy", "accelerate"} & sys.modules.keys())))
"""


def test_the_bundled_guard_brings_nothing_of_transformers() -> None:
    """It would be a second, and with its models a tenth of a gigabyte, in the classifier's process."""
    run = subprocess.run(
        [sys.executable, "-c", PROBE, "models/guard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == []
