"""Make a checkpoint that any server can load: the shape of a known model, random weights, a tokenizer and adapters.

    python -m loadtest.random_checkpoint smollm2-135m /tmp/smollm2 --adapters 8 --rank 8

writes the model to /tmp/smollm2 and its adapters to /tmp/smollm2-adapters, one folder each. Nothing is downloaded: the
tokenizer is a byte-level BPE trained on the sources of the Python that runs this. It answers nonsense at full speed.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from loadtest.geometries import CONFIG_BY_NAME, WEIGHT_STD, tensor_shapes, write_checkpoint

MAX_FILES = 3000
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Train a tokenizer of at most so many tokens and write it beside a checkpoint."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:MAX_FILES]
    # A few of them are there to test other encodings.
    texts = (source.read_text(encoding="utf-8", errors="replace") for source in sources)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_adapter(config: dict[str, Any], folder: Path, *, rank: int, seed: int) -> None:
    """Write a LoRA adapter of this rank for every linear layer, in peft's layout, bfloat16, neither factor zero."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors, modules = {}, set()
    for name, shape in tensor_shapes(config):
        if "_proj.weight" not in name:
            continue
        module = name.removesuffix(".weight")
        modules.add(module.rsplit(".", 1)[-1])
        for factor, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            weight = torch.empty(size).normal_(0.0, WEIGHT_STD, generator=generator)
            tensors[f"base_model.model.{module}.lora_{factor}.weight"] = weight.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    described = lora | {"target_modules": sorted(modules), "base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.random_checkpoint", description=__doc__)
    parser.add_argument("geometry", choices=sorted(CONFIG_BY_NAME))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapters", type=int, default=0, help="how many adapters")
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    config = CONFIG_BY_NAME[options.geometry]
    write_checkpoint(config, options.folder)
    write_tokenizer(options.folder, config["vocab_size"])
    for index in range(options.adapters):
        folder = options.folder.with_name(f"{options.folder.name}-adapters") / f"adapter-{index}"
        write_adapter(config, folder, rank=options.rank, seed=index)
    print(f"{options.folder}: {options.geometry}, {options.adapters} adapters of rank {options.rank}")


if __name__ == "__main__":
    main()
