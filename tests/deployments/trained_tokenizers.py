"""Small real tokenizers, one of each kind of decoder, trained here on a text in many scripts."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It doesn't care; it's a dog!",
    "def main() -> None:\n    print('hello, world')\n\n\treturn None  # done",
    "Größe, naïveté, façade — “quotes” … ½ € 10 000",
    "Привет, мир! Как дела? 你好，世界。こんにちは世界 안녕하세요",
    "emoji 👋🏽 family 👨‍👩‍👧‍👦 flag 🇳🇿 heart ❤️ x̂ combining é",
    "        eight spaces, and\r\nwindows lines\t\ttabs",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def _special() -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in SPECIAL]


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(_special())
    # Added and shown: as tool-call tags are.
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False), "naïve tag"])
    return tokenizer


@cache
def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=_special(), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _finished(tokenizer)


@cache
def byte_fallback_bpe() -> Tokenizer:
    """Llama 2, Mistral: SentencePiece BPE with byte fallback, the first space stripped."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, *BYTE_TOKENS], limit_alphabet=40, show_progress=False
    )
    trained.train_from_iterator(TEXTS, trainer)
    tokenizer = Tokenizer.from_str(trained.to_str().replace('"byte_fallback":false', '"byte_fallback":true'))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(_bytes_are_plain(tokenizer))


@cache
def byte_fallback_unigram() -> Tokenizer:
    """Gemma-like: Unigram with byte fallback, no stripping."""
    trained = Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=[*SPECIAL, *BYTE_TOKENS], unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(TEXTS[:3], trainer)
    tokenizer = Tokenizer.from_str(trained.to_str().replace('"byte_fallback":false', '"byte_fallback":true'))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(_bytes_are_plain(tokenizer))


@cache
def metaspace() -> Tokenizer:
    """T5, ALBERT: Metaspace, the first space dropped with the first token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _finished(tokenizer)


@cache
def word_piece() -> Tokenizer:
    """BERT: continuation pieces, and clean-up of spaces before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=250, special_tokens=SPECIAL, show_progress=False)
    )
    return _finished(tokenizer)


@cache
def no_decoder() -> Tokenizer:
    """No decoder at all: tokens joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return _finished(tokenizer)


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy that puts `<s>` in front of a text, as the tokenizers of many checkpoints do."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", copy.token_to_id("<s>"))]
    )
    return copy


def _bytes_are_plain(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with its byte tokens in the model alone, as converted SentencePiece files have them."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in BYTE_TOKENS]
    return Tokenizer.from_str(json.dumps(content))


ALL = {
    make.__name__: make
    for make in (byte_level, byte_fallback_bpe, byte_fallback_unigram, metaspace, word_piece, no_decoder)
}
