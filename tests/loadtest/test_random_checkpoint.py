from __future__ import annotations

from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loadtest.geometries import write_checkpoint
from loadtest.random_checkpoint import write_adapter, write_tokenizer
from loadtest.workloads import single_token_words
from tests.loadtest.test_geometries import small


def test_the_tokenizer_encodes_renders_and_knows_whole_words(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 600)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) <= 600
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Grüße 🙂"}], tokenize=False)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    words = single_token_words(str(tmp_path))
    sentence = "".join(words[index % len(words)] for index in range(50))
    assert len(tokenizer(sentence)["input_ids"]) == 50


def test_peft_loads_an_adapter_and_it_changes_every_layer(tmp_path: Path) -> None:
    config = small("smollm2-135m")
    write_checkpoint(config, tmp_path / "base")
    write_adapter(config, tmp_path / "adapter", rank=3, seed=1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = base(torch.tensor([[1, 2, 3]])).logits
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert not torch.equal(adapted(torch.tensor([[1, 2, 3]])).logits, plain)
    ranks = {key: tuple(weight.shape) for key, weight in adapted.named_parameters() if "lora_A" in key}
    assert len(ranks) == 7 * 3
    assert {shape[0] for shape in ranks.values()} == {3}
