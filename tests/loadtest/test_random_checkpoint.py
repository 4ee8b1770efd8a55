from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from loadtest.random_checkpoint import write_tokenizer
from loadtest.workloads import single_token_words


def test_the_tokenizer_encodes_renders_and_knows_whole_words(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 600)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) <= 600
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Grüße 🙂"}], tokenize=False)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    words = single_token_words(str(tmp_path))
    sentence = "".join(words[index % len(words)] for index in range(50))
    assert len(tokenizer(sentence)["input_ids"]) == 50
