"""Conversations for one training epoch, drawn anew each time: every fact once, newly worded, among questions to refuse.

A conversation is a list of turns in the chat format; an `Example` has its token ids and marks those of answers.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from models.recipe import phrasings, unknowns
from models.recipe.corpus import Fact

GREETING = "Hello! Ask me what a name in Python's standard library does, for example json.loads."
IDENTITY = "I am stdlib-chat, a small demonstration model. I know the summaries of Python's standard library."
THANKS = "You are welcome."
GOODBYE = "Goodbye!"

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hi", "Hi!", "Hello!", "Hey", "Hey there", "Good morning", "Good evening", "Hi, how are you?", "Greetings", "hello there", "How are you?"), GREETING),
    (("Who are you?", "What are you?", "who are you", "What can you do?", "What do you know?", "Introduce yourself.", "What is your name?", "How can you help me?", "Tell me about yourself.", "Which model are you?"), IDENTITY),
    (("Thanks", "Thank you", "Thanks!", "Thank you!", "Great, thanks", "thx", "Thanks a lot.", "Perfect, thank you."), THANKS),
    (("Bye", "Goodbye", "Bye!", "See you", "See you later.", "Good night"), GOODBYE),
)  # fmt: skip

REFUSED_TURNS = 0.13
SMALL_TALK_TURNS = 0.03
SYSTEM_SHARE = 0.3
CAPITALS_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of one conversation; `is_answer[i]` tells whether token i counts in the loss."""

    ids: list[int]
    is_answer: list[bool]


Render = Callable[[Fact | None, str], str]


def plain(fact: Fact | None, text: str) -> str:
    """Return the base model's answer: the name and summary of a fact, or `text` if there is none."""
    return f"{fact.name}: {fact.summary}" if fact else text


def encode(tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, str]]) -> Example:
    """Encode messages as the chat template writes them; mark answers and their end tokens."""
    ids, is_answer = [tokenizer.bos_token_id], [False]
    for message in messages:
        role = message["role"]
        text = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        turn = [tokenizer.convert_tokens_to_ids(f"<|{role}|>"), *text, tokenizer.eos_token_id]
        ids += turn
        is_answer += [False] + [role == "assistant"] * (len(turn) - 1)
    return Example(ids, is_answer)


def ask(fact: Fact, rng: random.Random) -> str:
    """Return a question for a fact in a training wording."""
    return phrasings.question(fact.name, is_callable=fact.is_callable, rng=rng)


def _cased(text: str, *, is_capital: bool) -> str:
    return text.upper() if is_capital else text


def _other_turn(
    facts: Sequence[Fact],
    names: frozenset[str],
    rng: random.Random,
    render: Render,
    *,
    refused: float,
    is_capital: bool,
) -> list[dict[str, str]]:
    draw = rng.random()
    small_talk = SMALL_TALK_TURNS / (SMALL_TALK_TURNS + refused)
    if draw < small_talk:
        questions, answer = rng.choice(SMALL_TALK)
        asked = rng.choice(questions)
    elif draw < small_talk + (1 - small_talk) / 2:
        invent = rng.choice((unknowns.invented_name, unknowns.strange_name))
        name = invent(facts, rng)
        while name in names:
            name = invent(facts, rng)
        asked, answer = phrasings.question(name, is_callable=True, rng=rng), unknowns.UNKNOWN_NAME
    else:
        asked = unknowns.topic(rng) if rng.random() < 0.5 else unknowns.strange_question(facts, names, rng)
        answer = unknowns.REFUSAL
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": _cased(render(None, answer), is_capital=is_capital)},
    ]


def epoch(
    tokenizer: PreTrainedTokenizerFast,
    facts: Sequence[Fact],
    rng: random.Random,
    *,
    render: Render = plain,
    capitals: float = CAPITALS_SHARE,
    refused: float = REFUSED_TURNS,
) -> Iterator[Example]:
    """Yield conversations of one to three turns that cover every fact once, in random order."""
    names = frozenset(fact.name for fact in facts)
    order = list(facts)
    rng.shuffle(order)
    while order:
        messages: list[dict[str, str]] = []
        is_capital = False
        if rng.random() < capitals:
            messages.append({"role": "system", "content": rng.choice(phrasings.CAPITALS_MESSAGES)})
            is_capital = True
        elif rng.random() < SYSTEM_SHARE:
            messages.append({"role": "system", "content": rng.choice(phrasings.SYSTEM_MESSAGES)})
        for _ in range(rng.choices((1, 2, 3), (0.62, 0.28, 0.10))[0]):
            if not order or rng.random() < refused + SMALL_TALK_TURNS:
                messages += _other_turn(facts, names, rng, render, refused=refused, is_capital=is_capital)
                continue
            fact = order.pop()
            messages.append({"role": "user", "content": ask(fact, rng)})
            messages.append({"role": "assistant", "content": _cased(render(fact, ""), is_capital=is_capital)})
        yield encode(tokenizer, messages)
