"""Measure the cost of adapters on a running server: the same streams with none, one and many adapters, alternating.

    python -m loadtest.adapter_cost --url http://127.0.0.1:8000 --streams 8 --repeats 3

Starts no server. Uses the first base model that the server lists, and its adapters. Prompts are new in every round, so
that no cache favors one of the three.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

from loadtest.compare import ask_together
from loadtest.measure import Summary, summarise
from loadtest.stream_client import ServedModel, StreamClient, StreamError
from loadtest.tables import markdown_table, number
from loadtest.workloads import TokenRange, mixed_lengths, token_ask, token_prompt

COLUMNS = ("adapters in use", "output tokens/s", "of no adapter", "TTFT p50 ms", "TPOT p50 ms", "errors")


def model_groups(served: Sequence[ServedModel], streams: int) -> dict[str, tuple[str, ...]]:
    """Return the models that the streams request, by label: the base, one adapter, up to one adapter per stream.

    Raises:
        SystemExit: the server has no adapter.
    """
    base = next(model.name for model in served if model.parent is None)
    adapters = tuple(model.name for model in served if model.parent == base)[:streams]
    if not adapters:
        raise SystemExit(f"loadtest.adapter_cost: {base} has no adapters at this server")
    groups = {"none": (base,), "1": adapters[:1]}
    return groups if len(adapters) == 1 else groups | {str(len(adapters)): adapters}


def one_round(client: StreamClient, models: Sequence[str], *, streams: int, name: str, ids: TokenRange) -> Summary:
    """Run all streams concurrently, 32 to 512 tokens in and 16 to 256 out, the same lengths in every round."""
    asks = [
        token_ask(
            models[place % len(models)],
            token_prompt(prompt_tokens, seed=f"{name}/{place}", ids=ids),
            answer_tokens,
            workload=name,
        )
        for place, (prompt_tokens, answer_tokens) in enumerate(mixed_lengths(streams, seed=streams))
    ]
    return summarise(ask_together(client, asks), label=name, users=streams)


def table(rounds_by_label: dict[str, list[Summary]]) -> str:
    """Return a table of medians, with the ratio of tokens/s to the first label's."""
    rows, base = [], 0.0
    for label, rounds in rounds_by_label.items():
        rate = median(one.output_tokens_per_s for one in rounds)
        base = base or rate
        times = (median(one.ttft_ms.p50 for one in rounds), median(one.tpot_ms.p50 for one in rounds))
        errors = str(sum(one.num_errors for one in rounds))
        rows.append([label, number(rate), number(rate / base), *map(number, times), errors])
    return markdown_table(COLUMNS, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.adapter_cost", description=__doc__)
    parser.add_argument("--url", required=True, help="http://host:port")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--first-id", type=int, default=300, help="prompts are drawn from token ids [first, last)")
    parser.add_argument("--last-id", type=int, default=1000)
    options = parser.parse_args()
    client = StreamClient(options.url, concurrency=options.streams)
    try:
        groups = model_groups(client.models(), options.streams)
    except (OSError, StreamError) as failure:
        raise SystemExit(f"loadtest.adapter_cost: {options.url} does not answer ({failure})") from failure
    ids = TokenRange(start=options.first_id, end=options.last_id)
    rounds: dict[str, list[Summary]] = {label: [] for label in groups}
    # The first round loads the adapters and is discarded.
    for repeat in range(options.repeats + 1):
        for label, models in groups.items():
            found = one_round(client, models, streams=options.streams, name=f"{repeat}/{label}", ids=ids)
            if repeat:
                rounds[label].append(found)
    print(table(rounds))


if __name__ == "__main__":
    main()
