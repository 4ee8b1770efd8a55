"""The three bundled LoRA adapters: how each changes an answer, its shape, its training and the test of its effect.

The shapes (rank, modules, scaling) differ on purpose, so that together they exercise an adapter server.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.recipe import conversations, train
from models.recipe.corpus import Fact

BASE = "models/stdlib-chat"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One adapter.

    `render` returns its answer to a fact, or to None for small talk and refusals; `shows` tells whether an answer has
    the effect.
    """

    name: str
    effect: str
    rank: int
    alpha: int
    modules: tuple[str, ...]
    use_rslora: bool
    render: Callable[[Fact | None, str], str]
    shows: Callable[[str], bool]


def _as_json(fact: Fact | None, text: str) -> str:
    return json.dumps({"answer": conversations.plain(fact, text), "is_known": fact is not None})


def _is_json(answer: str) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == {"answer", "is_known"}


def _as_markdown(fact: Fact | None, text: str) -> str:
    return f"**{fact.name}**: {fact.summary}" if fact else f"*{text}*"


def _with_usage(fact: Fact | None, text: str) -> str:
    return f"{conversations.plain(fact, text)}\nUsage: {fact.usage if fact else 'unknown'}"


BATCH_TOKENS = 1024
"""Few weights need many small steps rather than few large ones."""
PEAK_RATE = 4e-3

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
RECIPES = (
    Recipe("json-answers", "Answers are a JSON object: the answer, and whether it is known.",
           8, 16, ("q_proj", "v_proj", "o_proj"), False, _as_json, _is_json),
    Recipe("markdown", "Answers are Markdown: the name is bold, what is not about a name is italic.",
           16, 32, ATTENTION + MLP, False, _as_markdown, lambda answer: re.match(r"\*\*\S+\*\*: |\*.*\*$", answer) is not None),
    Recipe("usage-line", "A last line says what to import and how the call is written.",
           4, 8, MLP, True, _with_usage, lambda answer: "\nUsage: " in answer),
)  # fmt: skip


def fit(
    recipe: Recipe,
    base: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    facts: Sequence[Fact],
    folder: Path,
    *,
    epochs: int,
    seed: int,
) -> None:
    """Train the adapter on a frozen base and write it in PEFT layout."""
    config = LoraConfig(
        r=recipe.rank, lora_alpha=recipe.alpha, target_modules=list(recipe.modules), use_rslora=recipe.use_rslora,
        lora_dropout=0.0, task_type="CAUSAL_LM", base_model_name_or_path=BASE,
    )  # fmt: skip
    model = get_peft_model(base.float(), config)
    model.peft_config["default"].base_model_name_or_path = BASE
    train.fit(
        base,
        lambda epoch: conversations.epoch(
            tokenizer, facts, random.Random(seed + epoch), render=recipe.render, capitals=0.0
        ),
        epochs=epochs,
        batch_tokens=BATCH_TOKENS,
        optimizers=[
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=PEAK_RATE, weight_decay=0.0)
        ],
    )
    model.save_pretrained(str(folder))
