"""Pure, seeded generators of requests. Equal arguments give equal requests, on every machine.

Text workloads use the questions that the bundled model was trained for (`read_entries`). Workloads of exact lengths use
prompts of token ids, which every OpenAI-compatible server accepts at `/v1/completions`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

SPACED_WORD = re.compile("[Ġ▁][a-z]{3,}")
"""A token of a space and letters, as written in byte-level and sentencepiece vocabularies."""
STDLIB_FILE = Path(__file__).resolve().parents[1] / "models" / "data" / "stdlib.jsonl"

QUESTIONS = (
    "What does {name} do?",
    "What is {name} for?",
    "Explain {name}.",
    "Can you tell me about {name}?",
    "In one sentence, what is {name}?",
)
SHARED_SYSTEM_PROMPT = (
    "You answer questions about the standard library of Python. State what the function, class or module is for, in "
    "one sentence, as its documentation does. Do not add examples unless they are asked for. If you are asked about "
    "something else, say that you do not know."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A name of the standard library and the summary from its documentation."""

    name: str
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    Attributes:
        workload: label of its measurements.
        body: JSON of the request; the client adds `stream` and `stream_options`.
    """

    workload: str
    path: str
    body: dict[str, Any]

    @property
    def model(self) -> str:
        """The requested model name."""
        return str(self.body["model"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMix:
    """The mix of requests of a chat workload.

    Attributes:
        models: names to request, most popular first (a base model, then its adapters); popularity follows Zipf's law.
        zipf_exponent: 0 requests all names equally often; 1 requests the k-th 1/k as often as the first.
        max_earlier_turns: the number of turns before the question is drawn from 0 to this, to mix prompt lengths.
        max_prompt_chars: earlier turns that would exceed this are left out.
        shared_prefix_share: share of requests that start with one common system prompt.
        min_answer_tokens, max_answer_tokens: `max_tokens` is drawn uniformly between the two.
    """

    models: tuple[str, ...]
    zipf_exponent: float = 1.0
    max_earlier_turns: int = 3
    max_prompt_chars: int = 1200
    shared_prefix_share: float = 0.5
    min_answer_tokens: int = 16
    max_answer_tokens: int = 96
    temperature: float = 0.0


def read_entries(path: Path = STDLIB_FILE) -> tuple[Entry, ...]:
    """Return the entries of a JSON-lines file with `name` and `summary`."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return tuple(Entry(name=row["name"], summary=row["summary"]) for row in rows)


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Return `count` cumulative weights; the k-th name has weight k ** -exponent."""
    return list(accumulate(rank**-exponent for rank in range(1, count + 1)))


def chat_asks(mix: ChatMix, entries: Sequence[Entry], *, seed: int | str, user: int) -> Iterator[Ask]:
    """Yield the requests of one user, forever."""
    rng = random.Random(f"{seed}/{user}")
    weights = zipf_weights(len(mix.models), mix.zipf_exponent)
    while True:
        model = rng.choices(mix.models, cum_weights=weights)[0]
        body = {
            "model": model,
            "messages": _conversation(mix, entries, rng),
            "max_tokens": rng.randint(mix.min_answer_tokens, mix.max_answer_tokens),
            "temperature": mix.temperature,
            "seed": rng.randrange(2**31),
        }
        yield Ask(workload="chat", path="/v1/chat/completions", body=body)


def _conversation(mix: ChatMix, entries: Sequence[Entry], rng: random.Random) -> list[dict[str, str]]:
    question = _question(rng.choice(entries).name, rng)
    room = mix.max_prompt_chars - len(question)
    messages = []
    if rng.random() < mix.shared_prefix_share and len(SHARED_SYSTEM_PROMPT) <= room:
        messages.append({"role": "system", "content": SHARED_SYSTEM_PROMPT})
        room -= len(SHARED_SYSTEM_PROMPT)
    for _ in range(rng.randint(0, mix.max_earlier_turns)):
        entry = rng.choice(entries)
        earlier = _question(entry.name, rng)
        room -= len(earlier) + len(entry.summary)
        if room < 0:
            break
        messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": entry.summary}]
    return [*messages, {"role": "user", "content": question}]


def _question(name: str, rng: random.Random) -> str:
    return rng.choice(QUESTIONS).format(name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Token ids [start, end) that are plain text, not special tokens, in every relevant vocabulary."""

    start: int = 300
    end: int = 1000


def token_prompt(length: int, *, seed: int | str, ids: TokenRange) -> list[int]:
    """Return `length` token ids drawn uniformly."""
    rng = random.Random(f"prompt/{seed}")
    return [rng.randrange(ids.start, ids.end) for _ in range(length)]


def single_token_words(folder: str) -> tuple[str, ...]:
    """Return words, each with a leading space, that the tokenizer in a folder always encodes as one token.

    Raises:
        ValueError: it has no such words.
    """
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    candidates = (f" {key[1:]}" for key in sorted(tokenizer.get_vocab()) if SPACED_WORD.fullmatch(key))
    words = tuple(word for word in candidates if len(tokenizer.encode(word * 2, add_special_tokens=False).ids) == 2)
    if not words:
        raise ValueError(f"the tokenizer in {folder} has no token for any word with a space before it")
    return words


def token_ask(
    model: str, prompt: Sequence[int] | str, max_tokens: int, *, workload: str, ignore_eos: bool = True
) -> Ask:
    """Return a request for a greedy completion of this exact prompt; `ignore_eos` is a widely supported extension."""
    asked = prompt if isinstance(prompt, str) else list(prompt)
    body: dict[str, Any] = {"model": model, "prompt": asked, "max_tokens": max_tokens, "temperature": 0}
    if ignore_eos:
        body["ignore_eos"] = True
    return Ask(workload=workload, path="/v1/completions", body=body)


def mixed_lengths(count: int, *, seed: int) -> list[tuple[int, int]]:
    """Return `count` pairs (prompt tokens 32 to 512, answer tokens 16 to 256), both log-uniform."""
    rng = random.Random(f"lengths/{seed}")
    return [(round(32 * 16 ** rng.random()), round(16 * 16 ** rng.random())) for _ in range(count)]
