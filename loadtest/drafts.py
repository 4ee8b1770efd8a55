"""Measure the gain of draft tokens, and their cost where nothing can be drafted: the engine with and without them.

    python -m loadtest.drafts smollm2-135m --batches 1,8,32

With `--draft-model smollm2-135m --agreement 0.7`, a draft model guesses, and that share of its tokens is right.

A model with random weights writes nothing predictable. So the forward pass is real, but the sampled tokens are
dictated: sources of Python's standard library, in tokens of the bundled model.

    edit        a module with some names changed; the original is the prediction and is in the prompt
    quotation   a list of the signatures in a module that is in the prompt; no prediction
    code        a module that is not in the prompt: only its own repetitions can be found
    misleading  the last three tokens often occurred before, each time with a different continuation
    noise       random tokens: nothing is ever found

Each text runs alternately with and without drafts; figures are medians, for ratios over pairs of runs. On a machine
with other load the ratio of CPU seconds says more than that of wall-clock time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from engine.build import build_engine
from engine.config import EngineConfig
from engine.request import Request, RequestId, SamplingParams
from engine.sampling.sampler import Drawing, Sampler
from loadtest.arguments import at_least, at_least_1, counts
from loadtest.bench_engine import checkpoint, vocabulary
from loadtest.engine_alone import refusals_said
from loadtest.tables import markdown_table, number

TOKENIZER = Path(__file__).parents[1] / "models" / "stdlib-chat" / "tokenizer.json"
COLUMNS = ("text", "batch", "plain tokens/s", "with drafts", "ratio", "by CPU time", "tokens a step and row", "right")
WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Dictation:
    """A prompt and its dictated answer, in token ids."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    prediction_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Medians of one text and batch size: tokens per second after the first token, and the acceptance of drafts.

    Attributes:
        cpu_ratio: ratio of CPU seconds per token over all threads of this process, without drafts to with drafts.
    """

    text: str
    batch: int
    plain_tokens_per_s: float
    drafting_tokens_per_s: float
    ratio: float
    cpu_ratio: float
    tokens_per_step_and_row: float
    share_right: float

    def row(self) -> list[str]:
        """Return the cells of `COLUMNS`."""
        rates = (self.plain_tokens_per_s, self.drafting_tokens_per_s)
        shares = (f"{self.tokens_per_step_and_row:.2f}", f"{self.share_right:.0%}")
        ratios = (f"{self.ratio:.2f}", f"{self.cpu_ratio:.2f}")
        return [self.text, str(self.batch), *map(number, rates), *ratios, *shares]


def dictations(prompt_tokens: int, answer_tokens: int, vocab_size: int) -> dict[str, Dictation]:
    """Return the texts by name; prompts and answers are cut to at most these numbers of tokens."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    library = Path(sysconfig.get_paths()["stdlib"])

    def ids(text: str) -> tuple[int, ...]:
        return tuple(token_id for token_id in tokenizer.encode(text).ids if token_id < vocab_size)

    module = (library / "textwrap.py").read_text(encoding="utf-8")
    module_ids = ids(module)[:prompt_tokens]
    edited = re.sub(r"\btext\b", "string", re.sub(r"\bwidth\b", "columns", module))
    quoted = "\n".join(f"- `{line.strip()}`" for line in module.splitlines() if re.match(r" *(def|class) ", line))
    other = ids((library / "bisect.py").read_text(encoding="utf-8"))
    unlike = (library / "sched.py").read_text(encoding="utf-8")
    source = random.Random(0)
    noise = tuple(source.randrange(vocab_size) for _ in range(answer_tokens))
    return {
        "edit": Dictation(prompt_ids=module_ids, answer_ids=ids(edited)[:answer_tokens], prediction_ids=module_ids),
        "quotation": Dictation(prompt_ids=module_ids, answer_ids=ids(quoted)[:answer_tokens]),
        "code": Dictation(prompt_ids=other[:prompt_tokens], answer_ids=ids(unlike)[:answer_tokens]),
        "misleading": Dictation(prompt_ids=module_ids, answer_ids=wandering(module_ids, answer_tokens, source)),
        "noise": Dictation(prompt_ids=module_ids, answer_ids=noise),
    }


def wandering(ids: Sequence[int], count: int, source: random.Random) -> tuple[int, ...]:
    """Return a text of three-token pieces from random places in another text."""
    starts = source.choices(range(len(ids) - 3), k=-(-count // 3))
    return tuple(token_id for start in starts for token_id in ids[start : start + 3])[:count]


def dictate(sampler: Sampler, by_row: Mapping[int, Dictation], agreement: float = 1.0) -> None:
    """Patch a sampler to draw dictated tokens.

    Args:
        by_row: the dictation of each row.
        agreement: share of the positions at which the dictated token is drawn, and not another.
    """
    draw = sampler.draw

    def told(row: int, position: int) -> int:
        answer_ids = by_row[row].answer_ids
        token_id = answer_ids[min(position - len(by_row[row].prompt_ids), len(answer_ids) - 1)]
        return token_id if random.Random(position).random() < agreement else max(0, token_id - 1)

    def dictated(logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> Drawing:
        drawing = draw(logits, rows, positions)
        token_ids = [told(row, position) for row, position in zip(rows, positions, strict=True)]
        return replace(drawing, fetched=lambda: torch.tensor(token_ids))

    sampler.draw = dictated  # type: ignore[method-assign]


class Turn(NamedTuple):
    """One run, after the first tokens: tokens per second, CPU seconds per token, and the acceptance rate of drafts."""

    tokens_per_s: float
    token_cpu_s: float
    tokens_per_step_and_row: float
    share_right: float


class DictatedEngine:
    """An engine with a real forward pass and dictated answers.

    Args:
        agreement: share of the tokens that a draft model guesses right.
    """

    def __init__(self, config: EngineConfig, agreement: float = 1.0) -> None:
        self.engine = build_engine(config)
        self._by_row: dict[int, Dictation] = {}
        dictate(self.engine._runner._sampler, self._by_row)
        model = self.engine._scheduler._speculation._model
        if model is not None:
            dictate(model._runner._sampler, self._by_row, agreement)  # type: ignore[attr-defined]
        self._num_rows = self.engine.config.num_rows
        self._num_requests = 0

    def run(self, text: Dictation, batch: int, temperature: float) -> Turn:
        """Run `batch` concurrent requests for a text.

        Raises:
            RuntimeError: an answer differs from the dictation.
        """
        # The same for all rows, whichever a request gets.
        self._by_row.update(dict.fromkeys(range(self._num_rows), text))
        answers: dict[RequestId, list[int]] = {}
        for _ in range(batch):
            self._num_requests += 1
            name = RequestId(f"dictated-{self._num_requests}")
            params = SamplingParams(
                max_tokens=len(text.answer_ids), temperature=temperature, seed=self._num_requests, ignore_eos=True
            )
            prompt_ids, prediction_ids = text.prompt_ids, text.prediction_ids
            self.engine.add(
                Request(request_id=name, prompt_ids=prompt_ids, params=params, prediction_ids=prediction_ids)
            )
            answers[name] = []
        first_s, first_cpu_s, num_first, before = 0.0, 0.0, 0, self.engine.snapshot()
        while any(len(answer) < len(text.answer_ids) for answer in answers.values()):
            for emission in self.engine.step():
                answers[emission.request_id] += emission.token_ids
            if not first_s and all(answers.values()):
                first_s, first_cpu_s = time.perf_counter(), time.process_time()
                num_first = sum(map(len, answers.values()))
                before = self.engine.snapshot()
        took_s, cpu_s = time.perf_counter() - first_s, time.process_time() - first_cpu_s
        after = self.engine.snapshot()
        if any(tuple(answer) != text.answer_ids for answer in answers.values()):
            raise RuntimeError("the engine has answered something else than was dictated")
        num_tokens = sum(map(len, answers.values())) - num_first
        num_drafted = after.counters.num_draft_tokens - before.counters.num_draft_tokens
        share_right = (after.counters.num_accepted_tokens - before.counters.num_accepted_tokens) / (num_drafted or 1)
        per_step = num_tokens / (after.num_steps - before.num_steps) / batch
        return Turn(num_tokens / took_s, cpu_s / num_tokens, per_step, share_right)


def measure(
    engines: tuple[DictatedEngine, DictatedEngine],
    texts: dict[str, Dictation],
    batches: Sequence[int],
    *,
    repeats: int,
    temperature: float = 0.0,
) -> list[Result]:
    """Run every text at every batch size, alternating between the engine without drafts and the one with."""
    results = []
    for batch in batches:
        for name, text in texts.items():
            short = replace(text, answer_ids=text.answer_ids[:WARM_UP_TOKENS])
            for engine in engines:
                engine.run(short, batch, temperature)
            turns = [[engine.run(text, batch, temperature) for engine in engines] for _ in range(repeats)]
            results.append(
                Result(
                    text=name,
                    batch=batch,
                    plain_tokens_per_s=median(plain.tokens_per_s for plain, _ in turns),
                    drafting_tokens_per_s=median(drafting.tokens_per_s for _, drafting in turns),
                    ratio=median(drafting.tokens_per_s / plain.tokens_per_s for plain, drafting in turns),
                    cpu_ratio=median(plain.token_cpu_s / drafting.token_cpu_s for plain, drafting in turns),
                    tokens_per_step_and_row=median(drafting.tokens_per_step_and_row for _, drafting in turns),
                    share_right=median(drafting.share_right for _, drafting in turns),
                )
            )
    return results


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.drafts", description=__doc__)
    parser.add_argument("model", help="checkpoint folder, or the name of a geometry")
    parser.add_argument(
        "--batches", type=counts, default=(1, 8, 32), help="numbers of requests that run together, by commas"
    )
    parser.add_argument("--tokens", type=at_least_1, default=16, help="num_speculative_tokens")
    parser.add_argument("--prompt-tokens", type=at_least(4), default=1500)
    parser.add_argument("--answer-tokens", type=at_least(WARM_UP_TOKENS + 1), default=200)
    parser.add_argument("--texts", default="", help="some of the texts, by commas")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=at_least_1, default=5)
    parser.add_argument("--threads", type=at_least_1)
    parser.add_argument("--quantization", choices=("int8", "int4"), help="of both models; by default there is none")
    parser.add_argument("--draft-model", help="checkpoint folder, or the name of a geometry; by default there is none")
    parser.add_argument("--agreement", type=float, default=0.7, help="share of its tokens that are right")
    return parser.parse_args(arguments)


@refusals_said("drafts")
def main() -> None:
    """Measure and print."""
    options = parse()
    with checkpoint(options.model) as folder, ExitStack() as stack:
        draft_model = None if options.draft_model is None else str(stack.enter_context(checkpoint(options.draft_model)))
        config = EngineConfig(
            model_path=str(folder),
            num_threads=options.threads,
            quantization=options.quantization,
            max_model_len=options.prompt_tokens + options.answer_tokens,
            max_num_seqs=max(options.batches),
            num_speculative_tokens=0,
        )
        plain = DictatedEngine(config)
        speculative = replace(config, num_speculative_tokens=options.tokens, draft_model=draft_model)
        drafting = DictatedEngine(speculative, options.agreement)
        texts = dictations(options.prompt_tokens, options.answer_tokens, vocabulary(folder).end)
        wanted = options.texts.split(",") if options.texts else list(texts)
        if unknown := set(wanted) - texts.keys():
            raise SystemExit(f"loadtest.drafts: --texts: no {', '.join(sorted(unknown))} among {', '.join(texts)}")
        texts = {name: texts[name] for name in wanted}
        results = measure(
            (plain, drafting), texts, options.batches, repeats=options.repeats, temperature=options.temperature
        )
    print(markdown_table(COLUMNS, [result.row() for result in results]))
    print(json.dumps(vars(options) | {"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
