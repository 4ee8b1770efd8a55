"""The options that the users of this package add to Locust's command line, and their parsed values."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from loadtest.arguments import add_slo, at_least_1
from loadtest.workloads import ChatMix


def model_names(text: str) -> tuple[str, ...]:
    """Parse names of models, by commas.

    Raises:
        ArgumentTypeError: one is empty.
    """
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise ArgumentTypeError(f"a name is empty in {text!r}")
    return found


def add_options(parser: ArgumentParser) -> None:
    """Add these options to a parser."""
    group = parser.add_argument_group("Antiphon chat load")
    group.add_argument(
        "--models",
        type=model_names,
        default=(),
        help="names to ask, most popular first, by commas; default: all served",
    )
    group.add_argument("--zipf-exponent", type=float, default=1.0, help="popularity of names: 0 even, 1 Zipf's law")
    group.add_argument("--shared-prefix-share", type=float, default=0.5, help="share of chats with one system prompt")
    group.add_argument("--max-prompt-chars", type=int, default=1200, help="bound on the text of a chat")
    group.add_argument("--max-answer-tokens", type=at_least_1, default=96, help="bound on an answer, drawn up to this")
    group.add_argument("--seed", type=int, default=0, help="seed of what is asked")
    add_slo(parser)
    group.add_argument("--records", default=None, help="file that gets one line of JSON for every request")


def mix_of(options: Namespace, models: tuple[str, ...]) -> ChatMix:
    """Return the request mix of the users."""
    return ChatMix(
        models=models,
        zipf_exponent=options.zipf_exponent,
        shared_prefix_share=options.shared_prefix_share,
        max_prompt_chars=options.max_prompt_chars,
        min_answer_tokens=min(16, options.max_answer_tokens),
        max_answer_tokens=options.max_answer_tokens,
    )
