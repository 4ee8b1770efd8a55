"""The training loop of both chat models: geometry, batches of similar length, optimizers and their schedule.

The loss covers answers only. Muon trains the hidden matrices, AdamW the embeddings and norms: thousands of short facts,
each seen a few tens of times, take far fewer epochs than with AdamW alone. Independent of what the conversations say.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.recipe.conversations import Example
from models.recipe.tokenizer import CONTEXT_TOKENS

BATCH_TOKENS = 4096
WARM_UP_STEPS = 40


@dataclass(frozen=True, slots=True)
class Geometry:
    """The dimensions of a decoder."""

    hidden: int
    intermediate: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


CHAT = Geometry(hidden=256, intermediate=704, layers=6, query_heads=4, kv_heads=2, head_dim=64)
DRAFT = Geometry(hidden=128, intermediate=352, layers=2, query_heads=2, kv_heads=1, head_dim=64)


def new_model(geometry: Geometry, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a freshly initialized decoder over the tokenizer's vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=geometry.hidden,
        intermediate_size=geometry.intermediate,
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.query_heads,
        num_key_value_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded ids and next-token targets, int64 [rows, tokens]; a target of -100 is ignored."""

    ids: Tensor
    targets: Tensor


def batches(examples: Iterable[Example], rng: random.Random, batch_tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
    """Yield batches of at most `batch_tokens` padded tokens in random order; a longer example is a batch of its own.

    Rows of a batch have similar lengths, so there is little padding; at the end, it needs no mask in a causal model.
    """
    rows = sorted(examples, key=lambda example: len(example.ids))
    groups: list[list[Example]] = [[]]
    for row in rows:
        width = -(-len(row.ids) // 8) * 8
        if groups[-1] and width * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    for group in groups:
        width = -(-max(len(row.ids) for row in group) // 8) * 8
        ids = torch.zeros(len(group), width, dtype=torch.long)
        targets = torch.full((len(group), width), -100)
        for i, row in enumerate(group):
            num = len(row.ids)
            ids[i, :num] = torch.tensor(row.ids)
            kept = torch.tensor(row.is_answer[1:], dtype=torch.bool)
            targets[i, : num - 1][kept] = ids[i, 1:num][kept]
        yield Batch(ids, targets)


def optimizers_of(model: nn.Module, *, muon_rate: float = 0.02, adam_rate: float = 3e-3) -> list[torch.optim.Optimizer]:
    """Return Muon for hidden matrices and AdamW for the rest."""
    learnt = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in learnt if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    others = [p for name, p in learnt if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=adam_rate, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ]


def fit(
    model: LlamaForCausalLM,
    epoch_of: Callable[[int], Iterable[Example]],
    *,
    epochs: int,
    optimizers: list[torch.optim.Optimizer],
    batch_tokens: int = BATCH_TOKENS,
    after_epoch: Callable[[int], None] = lambda _: None,
) -> None:
    """Minimize the cross entropy of the answers; learning rates warm up, then fall linearly to 1% of their peaks."""
    decoder = torch.compile(model.get_decoder(), dynamic=True)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    step, total, start = 0, 0, time.monotonic()
    for epoch in range(epochs):
        prepared = list(batches(epoch_of(epoch), random.Random(epoch), batch_tokens))
        total = total or epochs * len(prepared)
        sums = [0.0, 0]
        for batch in prepared:
            scale = min(1.0, (step + 1) / WARM_UP_STEPS, max(0.01, 1 - step / total))
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * scale
            is_learnt = batch.targets >= 0
            with torch.autocast("cpu", torch.bfloat16):
                hidden = decoder(input_ids=batch.ids, use_cache=False).last_hidden_state
                # Compute logits for answer positions only, which saves half of the output matrix's work.
                logits = nn.functional.linear(hidden[is_learnt], model.get_output_embeddings().weight)
            loss = nn.functional.cross_entropy(logits.float(), batch.targets[is_learnt])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            sums[0] += float(loss.detach()) * int(is_learnt.sum())
            sums[1] += int(is_learnt.sum())
            step += 1
        print(f"epoch {epoch + 1}/{epochs} loss {sums[0] / sums[1]:.4f} {time.monotonic() - start:.0f} s", flush=True)
        after_epoch(epoch)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a bfloat16 copy; the model itself keeps its training precision."""
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.config.use_cache = True
    half.generation_config.update(do_sample=False, max_new_tokens=128, eos_token_id=model.config.eos_token_id)
    half.save_pretrained(str(folder))
