"""Model cards: what each bundled model or adapter is, its training data, and its measured figures."""

from collections.abc import Mapping
from pathlib import Path

from models.recipe.adapters import BASE, Recipe
from models.recipe.guard import Figures

LICENCE = (
    "The text learnt is the first sentence of docstrings of CPython's standard library, under the Python Software Foundation "
    "License; the kept pairs lie in `models/data/stdlib.jsonl`. The weights contain that text and stand under the same licence."
)
HOW = "Figures come from `python -m models.recipe.build`, which trains, measures and writes this card."


def _samples(samples: Mapping[str, str]) -> str:
    return "\n".join(f"- {question}\n\n  > " + told.replace("\n", "  \n  > ") for question, told in samples.items())


def _write(folder: Path, title: str, header: str, *sections: str) -> None:
    body = "\n\n".join((f"# {title}", *sections))
    (folder / "README.md").write_text(f"---\n{header}\n---\n\n{body}\n", encoding="utf-8")


def write_chat(
    folder: Path, num_facts: int, num_parameters: int, figures: Mapping[str, str], samples: Mapping[str, str]
) -> None:
    """Write the card of `stdlib-chat`."""
    _write(
        folder, "stdlib-chat", "license: psf-2.0\nlanguage: en\nlibrary_name: transformers\npipeline_tag: text-generation",
        f"A demonstration: a chat model of {num_parameters:,} parameters (Llama geometry, bfloat16) that has learnt by heart the documented "
        f"summaries of {num_facts:,} names of Python's standard library, and says that it does not know when asked something else.",
        "It understands nothing. Asked for a name outside its list it should refuse, and sometimes does not; what it says of a name is the docstring "
        "of one Python version (3.11). Do not rely on it for work.",
        "## Figures\n\n" + "\n".join(f"- {name}: {value}" for name, value in figures.items()) + f"\n\n{HOW}",
        "An answer counts if, after folding case and spacing, it is the summary, or differs by at most 5% of its characters; "
        "facts are drawn at random from those trained, only the wording of the question is new. A refusal counts if it begins with \"I do not know\".",
        f"## Samples\n\n{_samples(samples)}",
        f"## Data and licence\n\n{LICENCE}",
    )  # fmt: skip


def write_draft(folder: Path, num_parameters: int, agreement: str) -> None:
    """Write the card of `stdlib-draft`."""
    _write(
        folder, "stdlib-draft", "license: psf-2.0\nlanguage: en\nlibrary_name: transformers\npipeline_tag: text-generation",
        f"A draft model for speculative decoding of stdlib-chat: {num_parameters:,} parameters, the same tokenizer, trained on the same "
        "conversations. Alone it answers badly; it is there to propose tokens.",
        f"## Figures\n\nAgreement with stdlib-chat: {agreement}. {HOW}",
        f"## Data and licence\n\n{LICENCE}",
    )  # fmt: skip


def write_adapter(folder: Path, recipe: Recipe, figures: Mapping[str, str], samples: Mapping[str, str]) -> None:
    """Write the card of an adapter."""
    scaling = "alpha / sqrt(rank)" if recipe.use_rslora else "alpha / rank"
    _write(
        folder, recipe.name, f"license: psf-2.0\nbase_model: {BASE}\nlibrary_name: peft",
        f"{recipe.effect} A LoRA adapter on stdlib-chat: rank {recipe.rank}, alpha {recipe.alpha}, scaled by {scaling}, "
        f"on {', '.join(recipe.modules)}.",
        "## Figures\n\n" + "\n".join(f"- {name}: {value}" for name, value in figures.items()) + f"\n\n{HOW}",
        f"## Samples\n\n{_samples(samples)}",
        f"## Data and licence\n\n{LICENCE}",
    )  # fmt: skip


def write_guard(folder: Path, num_parameters: int, count: int, figures: Figures) -> None:
    """Write the card of the guard."""
    rows = "\n".join(f"| {label} | {p:.3f} | {r:.3f} |" for label, (p, r) in figures.by_label.items())
    _write(
        folder, "guard", "license: psf-2.0\nlanguage: en\nlibrary_name: transformers\npipeline_tag: text-classification",
        f"A demonstration, not a safety product: a text classifier of {num_parameters:,} parameters, multi-label, over the hazard names of "
        "the MLCommons AILuminate taxonomy. It learnt from short made-up sentences that name a topic, and knows little beyond their words: "
        "indirect, long, foreign or hostile text will pass. Any sequence classifier can take its place in the configuration.",
        f"## Figures\n\nOn {count} hazardous and {count} ordinary texts whose wordings and topics were not trained (the topics of hazards share "
        f"words with those trained), at threshold 0.5: precision {figures.precision:.3f}, recall {figures.recall:.3f}; "
        f"{figures.benign_flagged:.2%} of the ordinary texts are flagged.",
        f"Of all documented summaries and stdlib-chat's answers {figures.facts_flagged:.2%} are flagged; of the summaries never shown to it, "
        f"{figures.unseen_facts_flagged:.2%}. {HOW}",
        f"| hazard | precision | recall |\n|---|---|---|\n{rows}",
        "## Data and licence\n\nSentences made by `models/recipe/hazards.py`, and the text of `models/data/stdlib.jsonl` "
        "(Python Software Foundation License) as ordinary text.",
    )  # fmt: skip
