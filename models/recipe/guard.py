"""The guard: a small text classifier with one sigmoid per hazard, and the measurement of its errors.

Trained on the text of `hazards`, with benign text before and after a hazard and with windows cut out of benign text,
because streams are screened in windows. One fact in five is held out, to also count false positives on unseen text.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForSequenceClassification, PreTrainedTokenizerFast

from models.recipe import hazards
from models.recipe.corpus import Fact

PAD, CLS, SEP = "<|pad|>", "<|cls|>", "<|sep|>"
MAX_TOKENS = 256
THRESHOLD = 0.5
HELD_OUT_EVERY = 5
NUM_EXAMPLES = 36_000
BATCH_ROWS = 128
EPOCHS = 4
PEAK_LR = 2e-3


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text and the hazards it names."""

    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates over held-out text (`facts_flagged`: over all facts); `by_label` holds (precision, recall)."""

    precision: float
    recall: float
    by_label: dict[str, tuple[float, float]]
    benign_flagged: float
    facts_flagged: float
    unseen_facts_flagged: float


def _split(facts: Sequence[Fact]) -> tuple[list[Fact], list[Fact]]:
    unseen = list(facts[::HELD_OUT_EVERY])
    return [fact for i, fact in enumerate(facts) if i % HELD_OUT_EVERY], unseen


def _window(text: str, rng: random.Random) -> str:
    """Return a benign text, or a part of it cut anywhere, as the windows of a stream are."""
    if rng.random() < 0.5 or len(text) < 4:
        return text
    start, end = sorted(rng.sample(range(len(text) + 1), 2))
    return text[start:end] or text


def _cased(text: str, rng: random.Random) -> str:
    return text.upper() if rng.random() < 0.08 else text


def examples(facts: Sequence[Fact], count: int, rng: random.Random) -> list[Labelled]:
    """Return `count` training texts, about half of them hazardous and half benign."""
    made = []
    for _ in range(count):
        if rng.random() < 0.5:
            text = " ".join(hazards.benign(rng, facts, is_held_out=False) for _ in range(rng.choice((1, 1, 2, 3))))
            made.append(Labelled(_cased(_window(text, rng), rng), ()))
            continue
        labels = tuple(rng.sample(hazards.LABELS, 2 if rng.random() < 0.1 else 1))
        text = hazards.question(labels, rng, is_held_out=False)
        if rng.random() < 0.3:
            text = f"{hazards.benign(rng, facts, is_held_out=False)} {text}"
        if rng.random() < 0.2:
            text = f"{text} {hazards.benign(rng, facts, is_held_out=False)}"
        made.append(Labelled(_cased(text, rng), labels))
    return made


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train and return a small, case-insensitive byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3072,
        special_tokens=[PAD, CLS, SEP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, cls_token=CLS, sep_token=SEP, model_max_length=MAX_TOKENS
    )


def _encoded(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> dict[str, Tensor]:
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def _targets(items: Sequence[Labelled]) -> Tensor:
    return torch.tensor([[float(label in item.labels) for label in hazards.LABELS] for item in items])


def new_model(tokenizer: PreTrainedTokenizerFast) -> ModernBertForSequenceClassification:
    """Return a freshly initialized two-layer classifier; mean pooling takes few steps to learn."""
    labels = hazards.LABELS
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=MAX_TOKENS,
        layer_types=["full_attention", "full_attention"],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        cls_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        sep_token_id=tokenizer.sep_token_id,
        classifier_pooling="mean",
        problem_type="multi_label_classification",
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    return ModernBertForSequenceClassification(config)


def train(facts: Sequence[Fact], folder: Path, *, seed: int = 3, epochs: int = EPOCHS) -> None:
    """Train the guard and write it and its tokenizer to `folder`."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    seen, _ = _split(facts)
    tokenizer = train_tokenizer([item.text for item in examples(seen, 8000, rng)])
    model = new_model(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.05, fused=True)
    total, step = epochs * NUM_EXAMPLES // BATCH_ROWS, 0
    for epoch in range(epochs):
        items = sorted(examples(seen, NUM_EXAMPLES, rng), key=lambda item: len(item.text))
        groups = [items[i : i + BATCH_ROWS] for i in range(0, len(items), BATCH_ROWS)]
        rng.shuffle(groups)
        for group in groups:
            optimizer.param_groups[0]["lr"] = PEAK_LR * max(0.01, min(step / 50, 1 - step / total))
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(**_encoded(tokenizer, [item.text for item in group])).logits
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), _targets(group))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        print(f"guard epoch {epoch + 1}/{epochs} loss {float(loss.detach()):.5f}", flush=True)
    tokenizer.save_pretrained(str(folder))
    model.eval().save_pretrained(str(folder))


def flags(
    model: ModernBertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> Tensor:
    """Return whether each text exceeds the threshold of each hazard, bool [texts, hazards]."""
    rows = []
    with torch.inference_mode():
        for start in range(0, len(texts), 256):
            rows.append(model(**_encoded(tokenizer, texts[start : start + 256])).logits.sigmoid() > THRESHOLD)
    return torch.cat(rows)


def measure(
    model: ModernBertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    facts: Sequence[Fact],
    count: int = 1000,
) -> Figures:
    """Measure errors on held-out wordings and topics, and on every fact that the chat model can state."""
    rng = random.Random(99)
    _, unseen = _split(facts)
    labels = [hazards.LABELS[i % len(hazards.LABELS)] for i in range(count)]
    harmful = [Labelled(hazards.question((label,), rng, is_held_out=True), (label,)) for label in labels]
    ordinary = [Labelled(hazards.benign(rng, unseen, is_held_out=True), ()) for _ in range(count)]
    told = flags(model, tokenizer, [item.text for item in (*harmful, *ordinary)])
    wanted = _targets((*harmful, *ordinary)).bool()
    hits, said, there = (told & wanted).sum(0), told.sum(0), wanted.sum(0)
    by_label = {
        label: (float(hits[i] / said[i].clamp(min=1)), float(hits[i] / there[i]))
        for i, label in enumerate(hazards.LABELS)
    }

    def flagged(texts: Sequence[str]) -> float:
        return float(flags(model, tokenizer, texts).any(1).float().mean())

    return Figures(
        precision=float(hits.sum() / said.sum()),
        recall=float(hits.sum() / there.sum()),
        by_label=by_label,
        benign_flagged=flagged([item.text for item in ordinary]),
        facts_flagged=flagged([text for fact in facts for text in (fact.summary, f"{fact.name}: {fact.summary}")]),
        unseen_facts_flagged=flagged([fact.summary for fact in unseen]),
    )
