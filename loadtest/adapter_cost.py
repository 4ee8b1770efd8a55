"""Measure the cost of adapters on running servers: the same requests for no adapter, one and many, alternating.

    python -m loadtest.adapter_cost --url http://127.0.0.1:8000 --streams 8 --repeats 3
    python -m loadtest.adapter_cost --url ours=http://127.0.0.1:8000 --url peer=http://127.0.0.1:9000 --adapters 1,8

Starts no server. Uses the first base model with adapters that each server lists; of several servers, no more adapters
than the one with the fewest has. Prompts are new in every round, so that no cache favors a case. With more requests
than streams, each stream sends one after another. Figures are medians over the rounds. Failed requests are counted in
the table, with their messages below it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import nan

import gevent  # type: ignore[import-untyped, unused-ignore]
from gevent.pool import Pool  # type: ignore[import-untyped, unused-ignore]

from loadtest.arguments import add_seed, add_token_ids, at_least_1, token_ids
from loadtest.compare import SETTLE_S, cell_of
from loadtest.measure import Exchange, Summary, summarise
from loadtest.servers import NamedUrl, models_of, refuse_twice
from loadtest.stream_client import ServedModel, StreamClient
from loadtest.tables import markdown_table, number
from loadtest.workloads import TokenRange, mixed_lengths, token_ask, token_prompt

COLUMNS = ("adapters in use", "server", "output tokens/s", "of no adapter", "TTFT p50 ms", "TPOT p50 ms", "errors")


def base_and_adapters(served: Sequence[ServedModel], server: str) -> tuple[str, ...]:
    """Return the names of a server's first base model that has adapters, and of all these.

    Raises:
        SystemExit: there is none.
    """
    for base in served:
        adapters = tuple(model.name for model in served if model.parent == base.name)
        if base.parent is None and adapters:
            return base.name, *adapters
    raise SystemExit(f"loadtest.adapter_cost: {server} lists no base model with adapters")


def cases(counts: str | None, streams: int, most: int) -> list[int]:
    """Return the numbers of adapters to use: none, and `counts` or else one and one per stream, of `most` at hand.

    Raises:
        SystemExit: a count is not a number from 1 to `most`.
    """
    if counts is None:
        return sorted({0, 1, min(streams, most)})
    if not all(count.isdecimal() and 1 <= int(count) <= most for count in counts.split(",")):
        raise SystemExit(f"loadtest.adapter_cost: --adapters wants numbers from 1 to {most}, not {counts!r}")
    return [0, *map(int, counts.split(","))]


def one_round(
    client: StreamClient, models: Sequence[str], *, streams: int, requests: int, name: str, ids: TokenRange
) -> list[Exchange]:
    """Send requests, `streams` at once, 32 to 512 tokens in and 16 to 256 out, the same lengths in every round."""
    asks = [
        token_ask(
            models[place % len(models)],
            token_prompt(prompt_tokens, seed=f"{name}/{place}", ids=ids),
            answer_tokens,
            workload=name,
        )
        for place, (prompt_tokens, answer_tokens) in enumerate(mixed_lengths(requests, seed=requests))
    ]
    exchanges: list[Exchange] = Pool(streams).map(client.ask, asks)
    return exchanges


def table(rounds_by_case: dict[int, dict[str, list[Summary]]]) -> str:
    """Return a table of medians by case and server, with the ratio of tokens/s to the server's first case."""
    rows: list[list[str]] = []
    base_by_server: dict[str, float] = {}
    for case, rounds_by_server in rounds_by_case.items():
        for server, rounds in rounds_by_server.items():
            cell = cell_of(rounds)
            rate = cell.output_tokens_per_s
            base = base_by_server.setdefault(server, rate)
            figures = (rate, rate / base if base else nan, cell.ttft_ms, cell.tpot_ms)
            rows.append([str(case or "none"), server, *map(number, figures), str(cell.num_errors)])
    return markdown_table(COLUMNS, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.adapter_cost", description=__doc__)
    parser.add_argument(
        "--url", type=NamedUrl.parse, action="append", required=True, help="[name=]http://host:port, once per server"
    )
    parser.add_argument("--streams", type=at_least_1, default=8)
    parser.add_argument("--requests", type=at_least_1, help="in a round; default: one per stream")
    parser.add_argument("--adapters", help="how many to use in each case; default: one, and one per stream")
    parser.add_argument("--repeats", type=at_least_1, default=3)
    add_token_ids(parser)
    add_seed(parser)
    options = parser.parse_args()
    ids = token_ids(parser, options)
    refuse_twice([server.name for server in options.url])
    names_by_server = {server.name: base_and_adapters(models_of(server), server.name) for server in options.url}
    clients = {server.name: StreamClient(server.url, concurrency=options.streams) for server in options.url}
    counts = cases(options.adapters, options.streams, min(map(len, names_by_server.values())) - 1)
    rounds: dict[int, dict[str, list[Summary]]] = {count: {server: [] for server in clients} for count in counts}
    errors: set[str] = set()
    # The first round loads the adapters and is discarded.
    for repeat in range(options.repeats + 1):
        for count, found_by_server in rounds.items():
            for server, client in clients.items():
                base, *adapters = names_by_server[server]
                gevent.sleep(SETTLE_S)
                found = one_round(
                    client,
                    adapters[:count] or [base],
                    streams=options.streams,
                    requests=options.requests or options.streams,
                    name=f"{options.seed}/{repeat}/{count}",
                    ids=ids,
                )
                if repeat:
                    label = f"adapters in use: {count or 'none'}"
                    found_by_server[server].append(summarise(found, label=label))
                    errors |= {f"{server}, {label}: {one.error}" for one in found if one.error}
    print(table(rounds))
    print("".join(f"\n{error}" for error in sorted(errors)))


if __name__ == "__main__":
    main()
