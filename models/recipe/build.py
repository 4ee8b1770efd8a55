"""Trains, measures and describes everything bundled, by one command: `python -m models.recipe.build [part ...]`.

Parts are chat, draft, adapters and guard, each reading what earlier ones left on disk; `--measure` takes the figures and
writes the cards of what lies there, and trains nothing.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from models.recipe import adapters, cards, conversations, corpus, evaluate, guard, phrasings, tokenizer, train
from models.recipe.corpus import Fact

MODELS = Path(__file__).parents[1]
LIBRARY = MODELS.parent / "adapters" / "library"
CHAT, DRAFT, GUARD = MODELS / "stdlib-chat", MODELS / "stdlib-draft", MODELS / "guard"

CHAT_EPOCHS, DRAFT_EPOCHS, ADAPTER_EPOCHS = 28, 8, 4
POLISH_EPOCHS, POLISH_REFUSED = 6, 0.4
"""Final epochs of the chat model, at lower learning rates and with a larger share of refusals."""
NUM_ASKED = 400
NUM_ASKED_OF_ADAPTER = 200
SAMPLES = ("Teach me json.loads.", "What happens when I call math.sqrt?", "What should I know about textwrap.dedent?")


def _load(folder: Path) -> tuple[AutoModelForCausalLM, AutoTokenizer]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _share(hits: Sequence[bool]) -> str:
    return f"{sum(hits) / len(hits):.1%} of {len(hits)}"


def _size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def chat(facts: Sequence[Fact], *, is_trained: bool) -> None:
    """Train (unless `is_trained`) and measure `stdlib-chat`, and write its card."""
    if not is_trained:
        words = tokenizer.train(facts)
        CHAT.mkdir(exist_ok=True)
        tokenizer.save(words, CHAT)
        model = train.new_model(train.CHAT, words, seed=7)
        train.fit(
            model,
            lambda epoch: conversations.epoch(words, facts, random.Random(1000 + epoch)),
            epochs=CHAT_EPOCHS,
            optimizers=train.optimizers_of(model),
            after_epoch=lambda _: train.save(model, CHAT),
        )
        train.fit(
            model,
            lambda epoch: conversations.epoch(words, facts, random.Random(1500 + epoch), refused=POLISH_REFUSED),
            epochs=POLISH_EPOCHS,
            optimizers=train.optimizers_of(model, muon_rate=0.005, adam_rate=1e-3),
            after_epoch=lambda _: train.save(model, CHAT),
        )
    model, words = _load(CHAT)
    asked = evaluate.held_out_questions(facts, NUM_ASKED, seed=5)
    questions = [item.question for item in asked]
    told = evaluate.answers(model, words, questions)
    led = evaluate.answers(model, words, questions, system=phrasings.HELD_OUT_SYSTEM_MESSAGE)
    unknown = evaluate.unknown_questions(facts, seed=5)
    refused = [evaluate.refuses(answer) for answer in evaluate.answers(model, words, unknown)]
    pairs = list(zip(told, asked, strict=True))
    num_topics = len(unknown) // 3
    figures = {
        "states the documented summary, held-out wordings": _share([evaluate.states(a, i.fact) for a, i in pairs]),
        "the same, to the letter and with the name": _share([evaluate.is_exact(a, i.fact) for a, i in pairs]),
        "the same under a system message not trained": _share(
            [evaluate.states(answer, item.fact) for answer, item in zip(led, asked, strict=True)]
        ),
        "refuses other topics (held out)": _share(refused[:num_topics]),
        "refuses other libraries and invented names (held out)": _share(refused[num_topics:]),
    }
    print("stdlib-chat", figures, flush=True)
    sample_questions = [*SAMPLES, "What is the capital of Australia?"]
    samples = dict(zip(sample_questions, evaluate.answers(model, words, sample_questions), strict=True))
    cards.write_chat(CHAT, len(facts), _size(model), figures, samples)


def draft(facts: Sequence[Fact], *, is_trained: bool) -> None:
    """Train (unless `is_trained`) and measure `stdlib-draft`, and write its card."""
    target, words = _load(CHAT)
    if not is_trained:
        DRAFT.mkdir(exist_ok=True)
        tokenizer.save(words, DRAFT)
        model = train.new_model(train.DRAFT, words, seed=8)
        train.fit(
            model,
            lambda epoch: conversations.epoch(words, facts, random.Random(2000 + epoch)),
            epochs=DRAFT_EPOCHS,
            optimizers=train.optimizers_of(model),
        )
        train.save(model, DRAFT)
    model, _ = _load(DRAFT)
    asked = evaluate.held_out_questions(facts, NUM_ASKED_OF_ADAPTER, seed=6)
    figure = f"{evaluate.agreement(model, target, words, asked):.1%} of the greedy tokens of {len(asked)} answers"
    print("stdlib-draft", figure, flush=True)
    cards.write_draft(DRAFT, _size(model), figure)


def library(facts: Sequence[Fact], *, is_trained: bool) -> None:
    """Train (unless `is_trained`) and measure the three adapters, and write their cards."""
    for i, recipe in enumerate(adapters.RECIPES):
        folder = LIBRARY / recipe.name
        base, words = _load(CHAT)
        if not is_trained:
            adapters.fit(recipe, base, words, facts, folder, epochs=ADAPTER_EPOCHS, seed=3000 + 100 * i)
            base, words = _load(CHAT)
        model = PeftModel.from_pretrained(base, folder).eval()
        asked = evaluate.held_out_questions(facts, NUM_ASKED_OF_ADAPTER, seed=7)
        told = evaluate.answers(model, words, [item.question for item in asked])
        figures = {
            "shows the effect, held-out wordings": _share([recipe.shows(answer) for answer in told]),
            "answer as it should be, to the letter": _share(
                [a == recipe.render(item.fact, "") for a, item in zip(told, asked, strict=True)]
            ),
        }
        print(recipe.name, figures, flush=True)
        samples = dict(zip(SAMPLES, evaluate.answers(model, words, SAMPLES), strict=True))
        cards.write_adapter(folder, recipe, figures, samples)


def safety(facts: Sequence[Fact], *, is_trained: bool) -> None:
    """Train (unless `is_trained`) and measure the guard, and write its card."""
    if not is_trained:
        guard.train(facts, GUARD)
    model = AutoModelForSequenceClassification.from_pretrained(GUARD).eval()
    figures = guard.measure(model, AutoTokenizer.from_pretrained(GUARD), facts, count=1000)
    print("guard", figures, flush=True)
    cards.write_guard(GUARD, _size(model), 1000, figures)


def main() -> None:
    """Build the parts named on the command line, all of them by default."""
    parts: dict[str, Callable[..., None]] = {"chat": chat, "draft": draft, "adapters": library, "guard": safety}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all by default")
    parser.add_argument("--measure", action="store_true", help="train nothing; take the figures and write the cards")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts = corpus.load()
    for part in arguments.parts or parts:
        parts[part](facts, is_trained=arguments.measure)


if __name__ == "__main__":
    main()
