"""Measure the engine alone: tokens per second in prefill and decode, and the time of each part of a step.

    python -m loadtest.bench_engine smollm2-135m --batches 1,8,32
    python -m loadtest.bench_engine models/stdlib-chat --dtype float32 --threads 2

The model is a checkpoint folder, or the name of a geometry, for which random weights are written to a temporary folder.
Prompts are random token ids, new for every repetition, so that the prefix cache never hits. Figures are medians over
the repetitions; those of decoding are of the steps in which all requests of a batch decode. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from engine.build import build_engine
from engine.config import EngineConfig
from engine.loading.spec import read_model_spec
from loadtest.arguments import at_least, at_least_1, counts
from loadtest.engine_alone import EngineAlone, Generated, refusals_said
from loadtest.geometries import CONFIG_BY_NAME, write_checkpoint
from loadtest.tables import markdown_table, number
from loadtest.workloads import TokenRange, token_prompt

PARTS = ("schedule", "prepare", "forward", "sample", "wait", "emit")
ENGINE_FACTS = ("device", "dtype", "quantization", "num_threads", "max_batched_tokens")
"""Settings without which a figure cannot be compared with another, as they were chosen."""
PREFILL_STEP_S = 60.0
"""Bound on a step that prefills beside decoding: with a server's, prompts would be computed bit by bit."""
RESERVE_TOKENS = 16
"""A block of the cache for each request: beside running ones, a prompt waits unless each of them can have one more."""
COLUMNS = ("batch", "prefill tokens/s", "decode tokens/s", "decode step ms", *(f"{part} ms" for part in PARTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure: every batch size, with prompts and answers of these lengths in tokens."""

    batches: tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int
    repeats: int
    ids: TokenRange


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Medians over the repetitions of one batch size; times in milliseconds.

    Attributes:
        num_prefill_steps: steps until every prompt had its first token.
        num_decode_steps: steps in which all requests decoded; the figures of decoding are of these, None if it is 0.
    """

    batch: int
    prefill_tokens_per_s: float
    num_prefill_steps: float
    prefill_step_ms: float
    prefill_ms_by_part: dict[str, float]
    num_decode_steps: float
    decode_tokens_per_s: float | None
    decode_step_ms: float | None
    decode_ms_by_part: dict[str, float | None]

    def row(self) -> list[str]:
        """Return the cells of `COLUMNS`."""
        figures = (self.decode_tokens_per_s, self.decode_step_ms, *(self.decode_ms_by_part[part] for part in PARTS))
        cells = ("-" if figure is None else number(figure) for figure in figures)
        return [str(self.batch), number(self.prefill_tokens_per_s), *cells]


def measure(engine: EngineAlone, plan: Plan) -> list[BatchResult]:
    """Run the plan, with one more repetition per batch size to warm up."""
    results = []
    for batch in plan.batches:
        generated = []
        for repeat in range(-1, plan.repeats):
            prompts = [
                token_prompt(plan.prompt_tokens, seed=f"{batch}/{repeat}/{row}", ids=plan.ids) for row in range(batch)
            ]
            found = engine.generate(prompts, [plan.answer_tokens] * batch)
            # The first round warms up caches and threads.
            if repeat >= 0:
                generated.append(found)
        results.append(result_of(batch, plan.prompt_tokens, generated))
    return results


def result_of(batch: int, prompt_tokens: int, rounds: Sequence[Generated]) -> BatchResult:
    """Return the medians of the rounds."""
    full = [one.full_split for one in rounds if one.full_split.num_steps]
    return BatchResult(
        batch=batch,
        prefill_tokens_per_s=median(batch * prompt_tokens / one.prefill_s for one in rounds),
        num_prefill_steps=median(one.prefill_split.num_steps for one in rounds),
        prefill_step_ms=median(one.prefill_split.wall_ms for one in rounds),
        prefill_ms_by_part={part: median(one.prefill_split.ms_by_part[part] for one in rounds) for part in PARTS},
        num_decode_steps=median(one.full_split.num_steps for one in rounds),
        decode_tokens_per_s=_median([batch / split.wall_ms * 1000 for split in full]),
        decode_step_ms=_median([split.wall_ms for split in full]),
        decode_ms_by_part={part: _median([split.ms_by_part[part] for split in full]) for part in PARTS},
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


@contextmanager
def checkpoint(model: str) -> Iterator[Path]:
    """Yield a checkpoint folder: the given one, or a temporary one written for a named geometry.

    Raises:
        SystemExit: the name is neither.
    """
    if model in CONFIG_BY_NAME:
        with TemporaryDirectory(prefix=f"{model}-") as folder:
            write_checkpoint(CONFIG_BY_NAME[model], Path(folder))
            yield Path(folder)
        return
    if not (Path(model) / "config.json").exists():
        names = ", ".join(CONFIG_BY_NAME)
        raise SystemExit(f"loadtest.bench_engine: {model!r} is neither a checkpoint folder nor one of {names}")
    yield Path(model)


def plan_of(options: argparse.Namespace, folder: Path) -> Plan:
    """Return what the command line wants of a checkpoint."""
    return Plan(
        batches=options.batches,
        prompt_tokens=options.prompt_tokens,
        answer_tokens=options.answer_tokens,
        repeats=options.repeats,
        ids=vocabulary(folder),
    )


def vocabulary(folder: Path) -> TokenRange:
    """Return the token ids that prompts are drawn from, without the first ones, which tend to be special."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Models for text and images have that of their text decoder in its own section.
    size = config.get("text_config", config)["vocab_size"]
    return TokenRange(start=min(300, size // 2), end=size)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_engine", description=__doc__)
    parser.add_argument("model", help=f"checkpoint folder, or one of {', '.join(CONFIG_BY_NAME)}")
    parser.add_argument(
        "--batches", type=counts, default=(1, 8, 32), help="numbers of requests that run together, by commas"
    )
    parser.add_argument("--prompt-tokens", type=at_least_1, default=128)
    parser.add_argument("--answer-tokens", type=at_least(2), default=64)
    parser.add_argument("--repeats", type=at_least_1, default=3)
    add_engine_options(parser)
    return parser.parse_args(arguments)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `engine_config` reads in addition to the workload sizes."""
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--quantization", choices=("int8", "fp8", "int4"))
    parser.add_argument("--threads", type=at_least_1)
    parser.add_argument("--max-batched-tokens", type=at_least_1, default=1024)


def engine_config(options: argparse.Namespace, folder: Path) -> EngineConfig:
    """Return a configuration sized for the largest batch."""
    num_tokens = options.prompt_tokens + options.answer_tokens
    most_tokens = max(num_tokens, min(num_tokens + RESERVE_TOKENS, read_model_spec(str(folder)).max_position))
    return EngineConfig(
        model_path=str(folder),
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        num_threads=options.threads,
        max_model_len=most_tokens,
        max_num_seqs=max(options.batches),
        max_batched_tokens=max(options.max_batched_tokens, max(options.batches)),
        # Random weights produce repetitive output, on which the gain from drafts would be meaningless.
        num_speculative_tokens=0,
        max_decode_gap_s=PREFILL_STEP_S,
    )


@refusals_said("bench_engine")
def main() -> None:
    """Measure and print."""
    options = parse()
    with checkpoint(options.model) as folder:
        engine = EngineAlone(build_engine(engine_config(options, folder)))
        print(f"{options.model}: {engine.engine.config}\n")
        results = measure(engine, plan_of(options, folder))
        engine.close()
    print(markdown_table(COLUMNS, [result.row() for result in results]))
    for result in results:
        if result.decode_step_ms is None:
            print(f"\nno step decoded {result.batch} requests at once: ask for more --answer-tokens")
    facts = {name: getattr(options, name) for name in ("model", "prompt_tokens", "answer_tokens", "repeats")}
    facts |= {name: getattr(engine.engine.config, name) for name in ENGINE_FACTS}
    print(json.dumps(facts | {"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
