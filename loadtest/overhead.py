"""Measure the overhead of serving: TTFT and TPOT over HTTP minus those of the engine alone, for the same prompts.

    python -m loadtest.overhead --host http://127.0.0.1:8000 --checkpoint models/stdlib-chat --streams 1,8

Both are measured on this machine, alternating: first the server, then an engine in this process, with new prompts in
every repetition. Prompts are token ids, so that both compute the same; tokenization is not measured. Give this engine
as many threads and draft tokens as the server's, and stop other work: with few cores the difference is small and the
noise is not. The last line is one JSON array.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from engine.build import build_engine
from engine.config import EngineConfig
from loadtest.arguments import add_seed, at_least, at_least_1, checkpoint_folder, counts, http_url
from loadtest.bench_engine import Plan, add_engine_options, engine_config, plan_of
from loadtest.engine_alone import EngineAlone, refusals_said
from loadtest.measure import Exchange
from loadtest.servers import NamedUrl, find_server
from loadtest.stream_client import StreamClient
from loadtest.tables import markdown_table, number
from loadtest.workloads import token_ask, token_prompt

COLUMNS = ("streams", "TTFT engine ms", "TTFT HTTP ms", "added", "TPOT engine ms", "TPOT HTTP ms", "added")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Medians over all streams of all repetitions, in milliseconds."""

    streams: int
    engine_ttft_ms: float
    http_ttft_ms: float
    engine_tpot_ms: float
    http_tpot_ms: float

    def row(self) -> list[str]:
        """Return the cells of `COLUMNS`."""
        figures = (
            *(self.engine_ttft_ms, self.http_ttft_ms, self.http_ttft_ms - self.engine_ttft_ms),
            *(self.engine_tpot_ms, self.http_tpot_ms, self.http_tpot_ms - self.engine_tpot_ms),
        )
        return [str(self.streams), *map(number, figures)]


def overhead_of(streams: int, alone: Sequence[Exchange], over_http: Sequence[Exchange]) -> Overhead:
    """Return the medians over all exchanges.

    Raises:
        ValueError: an answer over HTTP failed, or no answer was long enough to be timed.
    """
    for exchange in over_http:
        if exchange.error is not None:
            raise ValueError(f"a request failed: {exchange.error}")
    return Overhead(
        streams=streams,
        engine_ttft_ms=_median([exchange.ttft_ms for exchange in alone]),
        http_ttft_ms=_median([exchange.ttft_ms for exchange in over_http]),
        engine_tpot_ms=_median([exchange.tpot_ms for exchange in alone]),
        http_tpot_ms=_median([exchange.tpot_ms for exchange in over_http]),
    )


def _median(values: Sequence[float | None]) -> float:
    found = [value for value in values if value is not None]
    if not found:
        raise ValueError("no answer was long enough to be timed: ask for more tokens, or screen no output meanwhile")
    return median(found)


def measure(client: StreamClient, model: str, engine: EngineAlone, plan: Plan, *, seed: int) -> list[Overhead]:
    """Run the plan, alternating between the server and the engine."""
    results = []
    for streams in plan.batches:
        alone: list[Exchange] = []
        over_http: list[Exchange] = []
        for repeat in range(-1, plan.repeats):
            prompts = [
                token_prompt(plan.prompt_tokens, seed=f"overhead/{seed}/{streams}/{repeat}/{row}", ids=plan.ids)
                for row in range(streams)
            ]
            asks = [token_ask(model, prompt, plan.answer_tokens, workload="overhead") for prompt in prompts]
            answered = client.ask_together(asks)
            generated = engine.generate(prompts, [plan.answer_tokens] * streams)
            # The first round warms both up.
            if repeat >= 0:
                over_http += answered
                alone += generated.exchanges
        results.append(overhead_of(streams, alone, over_http))
    return results


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.overhead", description=__doc__)
    parser.add_argument("--host", type=http_url, default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="name to ask; default: the first base model that the server lists")
    parser.add_argument("--checkpoint", type=checkpoint_folder, required=True, help="folder of the same model")
    parser.add_argument("--streams", dest="batches", type=counts, default=(1, 8), help="requests at once, by commas")
    parser.add_argument("--prompt-tokens", type=at_least_1, default=128)
    parser.add_argument("--answer-tokens", type=at_least(2), default=64)
    parser.add_argument("--repeats", type=at_least_1, default=5)
    parser.add_argument(
        "--draft-tokens", type=at_least(0), help="the server's num_speculative_tokens; default: the default of both"
    )
    add_seed(parser)
    add_engine_options(parser)
    return parser.parse_args(arguments)


def alike(options: argparse.Namespace) -> EngineConfig:
    """Return the configuration of an engine that computes what the server's does, with its drafts and its pace."""
    config = engine_config(options, Path(options.checkpoint))
    return replace(config, num_speculative_tokens=options.draft_tokens, max_decode_gap_s=None)


@refusals_said("overhead")
def main() -> None:
    """Measure and print."""
    options = parse()
    server = find_server(NamedUrl(name="the server", url=options.host), options.model)
    plan = plan_of(options, Path(options.checkpoint))
    engine = EngineAlone(build_engine(alike(options)))
    client = StreamClient(options.host, concurrency=max(options.batches))
    try:
        results = measure(client, server.model, engine, plan, seed=options.seed)
    except ValueError as failure:
        raise SystemExit(f"loadtest.overhead: {failure}") from failure
    finally:
        engine.close()
        client.close()
    print(markdown_table(COLUMNS, [result.row() for result in results]))
    print(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
