"""Measure the cost of more adapters than fit on the device: the engine alone, few and many in use, alternating.

    python -m loadtest.adapter_residency models/stdlib-chat --registered 1000 --slots 32

Random adapters of `--rank` are written into a temporary folder. Each is requested once, to fill host memory. Then each
stream sends one request after another, each for a newly drawn adapter. The cases: always the same one; any registered
one, by Zipf's law; uniformly one of as many as the device has slots; uniformly one of twice as many. The third against
the first shows the cost of different adapters in one batch, the second against the third the cost of adapters that do
not all fit. Prompts are always new. Answer lengths vary, and are the same in every case: with a single length, streams
that start together would end together forever and have their prompts computed together, except those that wait for an
adapter. Figures are medians over the rounds, each with the median of its ratio to the other case's round.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from adapters.identity import AdapterDigest, AdapterRef
from adapters.registry import reference
from engine.build import build_engine
from engine.config import EngineConfig
from engine.request import RequestId
from loadtest.arguments import at_least_1, checkpoint_folder
from loadtest.engine_alone import EngineAlone, refusals_said
from loadtest.random_adapter import write_adapter
from loadtest.tables import markdown_table, number
from loadtest.workloads import TokenRange, token_prompt, zipf_weights

COLUMNS = ("case", "value", "of what it is compared with", "target")
IDS = TokenRange()
PROMPT_TOKENS = 32

Draw = Callable[[random.Random], AdapterDigest]
"""Draws the adapter of the next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Result of one round: tokens/s of all streams together, and the TTFT of each request."""

    tokens_per_s: float
    ttft_ms: list[float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of a case, to be compared with the same of another.

    Attributes:
        relation, bound: target of the ratio, "at least" or "under" a number; None for no target.
    """

    name: str
    figure: Callable[[Round], float]
    case: str
    other: str
    relation: str = ""
    bound: float | None = None

    @property
    def target(self) -> str:
        """The target in words; empty if there is none."""
        return "" if self.bound is None else f"{self.relation} {self.bound:g}"

    def verdict(self, ratio: float) -> str:
        """Return whether the target is met; empty without a target."""
        if self.bound is None:
            return ""
        return "met" if is_met(ratio, self.relation, self.bound) else "MISSED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row: the median over the rounds of a figure, and of its ratio to the other case's figure."""

    name: str
    value: float
    ratio: float
    target: str
    verdict: str


@dataclass(slots=True, kw_only=True)
class Streams:
    """Concurrent streams over one engine, each of which sends the next request as soon as one is answered."""

    alone: EngineAlone
    num_streams: int
    answer_tokens: int
    num_asked: int = field(default=0, init=False)

    def run(self, draw: Draw, num_requests: int) -> Round:
        """Send `num_requests` requests in total and wait for every answer.

        Raises:
            RuntimeError: the engine failed on a request.
        """
        rng, lengths = random.Random(self.num_asked), self._lengths(num_requests)
        started_s, num_done = time.perf_counter(), 0
        started_by_id: dict[RequestId, float] = {}
        first_by_id: dict[RequestId, float] = {}

        def ask() -> None:
            self.num_asked += 1
            prompt = token_prompt(PROMPT_TOKENS, seed=f"residency-{self.num_asked}", ids=IDS)
            at_s, length = time.perf_counter(), lengths[len(started_by_id)]
            started_by_id[self.alone.add(prompt, length, draw(rng))] = at_s

        for _ in range(min(self.num_streams, num_requests)):
            ask()
        while num_done < num_requests:
            emissions = self.alone.step()
            now_s = time.perf_counter()
            for emission in emissions:
                first_by_id.setdefault(emission.request_id, now_s)
                if emission.finish_reason is not None:
                    num_done += 1
                    if len(started_by_id) < num_requests:
                        ask()
        return Round(
            tokens_per_s=sum(lengths) / (time.perf_counter() - started_s),
            ttft_ms=[(first_by_id[name] - at_s) * 1000 for name, at_s in started_by_id.items()],
        )

    def _lengths(self, num_requests: int) -> list[int]:
        """Return the length of each answer in tokens, from 0.5 to 1.5 times the mean."""
        rng, half = random.Random(num_requests), self.answer_tokens // 2
        return [rng.randint(self.answer_tokens - half, self.answer_tokens + half) for _ in range(num_requests)]


def is_met(found: float, relation: str, bound: float) -> bool:
    """Whether a figure is "at least" a bound, or, with any other relation, under it."""
    return found >= bound if relation == "at least" else found < bound


def rate(one: Round) -> float:
    """Return the tokens/s."""
    return one.tokens_per_s


def median_ttft_ms(one: Round) -> float:
    """Return the median TTFT."""
    return median(one.ttft_ms)


COMPARISONS = (
    Comparison("all by Zipf: tokens/s, of one adapter", rate, "zipf", "one", "at least", 0.85),
    Comparison("as many as slots: tokens/s, of one adapter", rate, "fits", "one"),
    Comparison("all by Zipf: tokens/s, of as many as slots", rate, "zipf", "fits"),
    Comparison("all by Zipf: TTFT p50 ms, of one adapter", median_ttft_ms, "zipf", "one"),
    Comparison("twice the slots: TTFT p50 ms, of as many as slots", median_ttft_ms, "twice", "fits", "under", 2),
    Comparison("twice the slots: tokens/s, of as many as slots", rate, "twice", "fits"),
)


def by_zipf(digests: Sequence[AdapterDigest], exponent: float) -> Draw:
    """Return a draw of the k-th adapter with weight k ** -exponent."""
    weights = zipf_weights(len(digests), exponent)
    return lambda rng: rng.choices(digests, cum_weights=weights)[0]


def one_of(digests: Sequence[AdapterDigest]) -> Draw:
    """Return a uniform draw."""
    return lambda rng: rng.choice(digests)


def each_of(digests: Sequence[AdapterDigest]) -> Draw:
    """Return a draw that yields each adapter once, in order of digest, which is arbitrary."""
    left = iter(sorted(digests))
    return lambda _rng: next(left)


def draws(digests: Sequence[AdapterDigest], slots: int, exponent: float) -> dict[str, Draw]:
    """Return the cases, for at least twice as many adapters as slots."""
    return {
        "one": one_of(digests[:1]),
        "zipf": by_zipf(digests, exponent),
        "fits": one_of(digests[:slots]),
        "twice": one_of(digests[: 2 * slots]),
    }


def write_adapters(folder: Path, model: str, count: int, rank: int) -> list[AdapterRef]:
    """Write `count` different random adapters and return their references."""
    refs = []
    for index in range(count):
        write_adapter(folder / f"a{index}", model, rank=rank, seed=index)
        refs.append(reference(f"a{index}", str(folder / f"a{index}")))
    return refs


def measure(
    streams: Streams, cases: dict[str, Draw], *, requests: int, repeats: int
) -> Iterator[dict[str, list[Round]]]:
    """Run the cases alternately, and yield all their rounds after each; the first warms up and is discarded."""
    found: dict[str, list[Round]] = {label: [] for label in cases}
    for repeat in range(repeats + 1):
        for label, draw in cases.items():
            one = streams.run(draw, requests)
            if repeat:
                found[label].append(one)
        if repeat:
            yield found


def compared(found: dict[str, list[Round]]) -> list[Compared]:
    """Return the rows."""
    rows = []
    for wanted in COMPARISONS:
        these, those = ([*map(wanted.figure, found[case])] for case in (wanted.case, wanted.other))
        ratio = median(a / b for a, b in zip(these, those, strict=True))
        verdict = wanted.verdict(ratio)
        rows.append(Compared(name=wanted.name, value=median(these), ratio=ratio, target=wanted.target, verdict=verdict))
    return rows


@refusals_said("adapter_residency")
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.adapter_residency", description=__doc__)
    parser.add_argument("model", type=checkpoint_folder, help="checkpoint folder")
    parser.add_argument("--registered", type=at_least_1, default=1000)
    parser.add_argument("--slots", type=at_least_1, default=32, help="adapters that fit on the device at once")
    parser.add_argument(
        "--host-bytes", type=at_least_1, help="of adapters that are kept in host memory; else the default"
    )
    parser.add_argument("--rank", type=at_least_1, default=8)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the popularity")
    parser.add_argument("--streams", type=at_least_1, default=16)
    parser.add_argument("--answer-tokens", type=at_least_1, default=64, help="of a mean answer")
    parser.add_argument("--requests", type=at_least_1, default=256, help="of each case in each round")
    parser.add_argument("--repeats", type=at_least_1, default=5)
    parser.add_argument("--threads", type=at_least_1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args()
    if options.registered < 2 * options.slots:
        parser.error("at least twice as many adapters as slots are needed")
    config = EngineConfig(
        model_path=options.model,
        dtype=options.dtype,
        num_threads=options.threads,
        max_num_seqs=options.streams,
        max_model_len=PROMPT_TOKENS + 2 * options.answer_tokens,
        max_device_adapters=options.slots,
        max_host_adapter_bytes=options.host_bytes,
    )
    with TemporaryDirectory(prefix="adapters-") as folder:
        refs = write_adapters(Path(folder), options.model, options.registered, options.rank)
        digests = [ref.digest for ref in refs]
        alone = EngineAlone(build_engine(config, refs))
        streams = Streams(alone=alone, num_streams=options.streams, answer_tokens=options.answer_tokens)
        streams.run(each_of(digests), len(digests))
        cases = draws(digests, options.slots, options.zipf)
        *_, found = measure(streams, cases, requests=options.requests, repeats=options.repeats)
        alone.close()
    rows = [[row.name, number(row.value), number(row.ratio), row.target] for row in compared(found)]
    print(markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
