"""Write a checkpoint that any server can load: a known model's geometry, random weights, a tokenizer and adapters.

    python -m loadtest.random_checkpoint smollm2-135m /tmp/smollm2 --adapters 8 --rank 8

writes the model to /tmp/smollm2 and its adapters to /tmp/smollm2-adapters, one folder each. Nothing is downloaded: the
tokenizer is a byte-level BPE trained on the sources of the Python that runs this. It answers nonsense at full speed.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from loadtest.arguments import at_least, at_least_1
from loadtest.geometries import CONFIG_BY_NAME, write_checkpoint
from loadtest.random_adapter import write_adapter

MAX_FILES = 3000
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Train a tokenizer of at most `vocab_size` tokens and write it into a checkpoint's folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:MAX_FILES]
    # A few of them use other encodings, for tests.
    texts = (source.read_text(encoding="utf-8", errors="replace") for source in sources)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.random_checkpoint", description=__doc__)
    parser.add_argument("geometry", choices=sorted(CONFIG_BY_NAME))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapters", type=at_least(0), default=0, help="how many adapters")
    parser.add_argument("--rank", type=at_least_1, default=8)
    options = parser.parse_args()
    config = CONFIG_BY_NAME[options.geometry]
    write_checkpoint(config, options.folder)
    write_tokenizer(options.folder, config["vocab_size"])
    for index in range(options.adapters):
        folder = options.folder.with_name(f"{options.folder.name}-adapters") / f"adapter-{index}"
        write_adapter(folder, str(options.folder), rank=options.rank, seed=index)
    print(f"{options.folder}: {options.geometry}, {options.adapters} adapters of rank {options.rank}")


if __name__ == "__main__":
    main()
