"""Figures for the cards: greedy answers to held-out wordings, compared with the documented text.

An answer states the summary if, after folding case and spacing, it is the summary (with or without the name before it)
or has a similarity ratio of at least `NEAR` to it. A refusal begins with "I do not know".
"""

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from models.recipe import phrasings, unknowns
from models.recipe.corpus import Fact

NEAR = 0.95
BATCH_ROWS = 40


@dataclass(frozen=True, slots=True)
class HeldOutQuestion:
    """A question and the fact that it asks for."""

    question: str
    fact: Fact


def held_out_questions(facts: Sequence[Fact], count: int, seed: int) -> list[HeldOutQuestion]:
    """Return questions for `count` random facts, cycling through the held-out wordings."""
    chosen = random.Random(seed).sample(list(facts), count)
    wordings = phrasings.HELD_OUT
    return [HeldOutQuestion(wordings[i % len(wordings)].format(name=fact.name), fact) for i, fact in enumerate(chosen)]


def unknown_questions(facts: Sequence[Fact], seed: int) -> list[str]:
    """Return held-out topics, then held-out libraries and invented names in held-out wordings."""
    names = [*unknowns.HELD_OUT_LIBRARIES, *unknowns.held_out_names(facts, 40, random.Random(seed))]
    wordings = phrasings.HELD_OUT
    return [*unknowns.HELD_OUT_TOPICS, *(wordings[i % len(wordings)].format(name=name) for i, name in enumerate(names))]


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: Sequence[str], *, system: str | None = None
) -> list[str]:
    """Return greedy answers, generated in left-padded batches."""
    head = [{"role": "system", "content": system}] if system else []
    prompts = [
        tokenizer.apply_chat_template(
            [*head, {"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in questions
    ]
    told: list[str] = []
    for start in range(0, len(prompts), BATCH_ROWS):
        encoded = tokenizer(prompts[start : start + BATCH_ROWS], padding=True, return_tensors="pt")
        with torch.inference_mode():
            made = model.generate(
                input_ids=encoded["input_ids"],
                attention_mask=encoded["attention_mask"],
                max_new_tokens=110,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        told += tokenizer.batch_decode(made[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return told


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


def states(answer: str, fact: Fact) -> bool:
    """Return whether the answer states the fact's summary."""
    told, wanted = _folded(answer), _folded(fact.summary)
    told = told.removeprefix(f"{fact.name.casefold()}: ")
    return told == wanted or difflib.SequenceMatcher(None, told, wanted).ratio() >= NEAR


def is_exact(answer: str, fact: Fact) -> bool:
    """Return whether the answer is exactly the name and the summary."""
    return answer.strip() == f"{fact.name}: {fact.summary}"


def refuses(answer: str) -> bool:
    """Return whether the answer is a refusal."""
    return _folded(answer).startswith("i do not know")


def agreement(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    asked: Sequence[HeldOutQuestion],
) -> float:
    """Return the fraction of the target's greedy tokens that the draft predicts, given the same text before them."""
    same, total = 0, 0
    for item, told in zip(asked, answers(target, tokenizer, [item.question for item in asked]), strict=True):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": item.question}], add_generation_prompt=True, tokenize=False
        )
        head = tokenizer(prompt)["input_ids"]
        ids = head + tokenizer(told)["input_ids"] + [tokenizer.eos_token_id]
        with torch.inference_mode():
            guessed = draft(input_ids=torch.tensor([ids])).logits[0, len(head) - 1 : -1].argmax(-1)
        same += int((guessed == torch.tensor(ids[len(head) :])).sum())
        total += len(guessed)
    return same / total
