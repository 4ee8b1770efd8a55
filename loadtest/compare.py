"""Compare running servers on the same workloads, alternating, so that other load on the machine affects all alike.

    python -m loadtest.compare --url ours=http://127.0.0.1:8000 --url peer=http://127.0.0.1:9000 --repeats 2

Starts no server. Prompts are token ids at `/v1/completions`, so that every server sees prompts of the same length; for
servers that take only text, `--words-of` a tokenizer sends words of one token each. The long prompts are cut to the
shortest context that a server lists. Prompts are new in each repetition and the same for every server; another
repetition before the first is discarded. Figures are medians over the repetitions, in parentheses the ratio to the
first server's. Failed requests are counted in the table, with their messages below it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

import gevent  # type: ignore[import-untyped, unused-ignore]
from gevent.event import Event  # type: ignore[import-untyped, unused-ignore]

from loadtest.arguments import add_seed, add_token_ids, at_least_1, folder_with, token_ids
from loadtest.measure import Exchange, Summary, median, summarise
from loadtest.servers import NamedUrl, Server, find_server, refuse_twice
from loadtest.stream_client import StreamClient
from loadtest.tables import markdown_table, number
from loadtest.workloads import Ask, TokenRange, mixed_lengths, single_token_words, token_ask, token_prompt

MAX_STREAMS = 64
MIXED_TOKENS = 512 + 256
LONGEST_TOKENS = 4096 + 16
SPARE_TOKENS = 8
"""Of a context that prompts are cut to: a tokenizer may add some to a text."""
SETTLE_S = 2.0
"""Pause between the turns of two servers: threads of some spin for up to a second after their last answer."""
BEHIND_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Makes the requests of one repetition for one server.

    Attributes:
        round_name: identifies the repetition; prompts are a function of it.
        words: if not empty, prompts are sent as text made of these instead of as token ids.
    """

    model: str
    round_name: str
    ids: TokenRange
    ignore_eos: bool
    words: tuple[str, ...] = ()

    def ask(self, workload: str, prompt: Sequence[int], answer_tokens: int) -> Ask:
        """Return one request."""
        asked = prompt if not self.words else "".join(self.words[number % len(self.words)] for number in prompt)
        return token_ask(self.model, asked, answer_tokens, workload=workload, ignore_eos=self.ignore_eos)

    def fresh(self, length: int, name: str) -> list[int]:
        """Return a prompt that is unique to this repetition and `name`."""
        return token_prompt(length, seed=f"{self.round_name}/{name}", ids=self.ids)


Workload = Callable[[StreamClient, Prompts], list[list[Exchange]]]
"""Runs against one server and returns the exchanges for each table row that it fills."""


def one_stream(client: StreamClient, prompts: Prompts) -> list[list[Exchange]]:
    """One request alone: 128 tokens in, 128 out."""
    return [[client.ask(prompts.ask("one", prompts.fresh(128, "one"), 128))]]


def shared_prefix(length: int) -> Workload:
    """Return the workload of a prefix: first cold, then warm in four concurrent requests with other tails; 32 out."""

    def run(client: StreamClient, prompts: Prompts) -> list[list[Exchange]]:
        prefix = prompts.fresh(length, "prefix")
        cold = client.ask(prompts.ask("cold", prefix + prompts.fresh(16, "tail"), 32))
        asks = [prompts.ask("warm", prefix + prompts.fresh(16, f"tail {place}"), 32) for place in range(4)]
        return [[cold], client.ask_together(asks)]

    return run


def mixed_streams(count: int) -> Workload:
    """Return the workload of `count` concurrent streams: 32 to 512 in, 16 to 256 out."""

    def run(client: StreamClient, prompts: Prompts) -> list[list[Exchange]]:
        # The lengths are the same in every repetition, or medians would compare different work.
        lengths = mixed_lengths(count, seed=count)
        asks = [
            prompts.ask("mixed", prompts.fresh(prompt_tokens, f"mixed {place}"), answer_tokens)
            for place, (prompt_tokens, answer_tokens) in enumerate(lengths)
        ]
        return [client.ask_together(asks)]

    return run


def long_arrival(length: int) -> Workload:
    """Return the workload of four streams that decode (128 in, 256 out); once all have begun, a long prompt arrives."""

    def run(client: StreamClient, prompts: Prompts) -> list[list[Exchange]]:
        begun = [Event() for _ in range(4)]

        def decode(place: int) -> Exchange:
            ask = prompts.ask("decoding", prompts.fresh(128, f"decoding {place}"), 256)
            try:
                return client.ask(ask, on_first_text=begun[place].set)
            finally:
                begun[place].set()

        decoding = [gevent.spawn(decode, place) for place in range(4)]
        gevent.wait(begun)
        arrival = client.ask(prompts.ask("arrival", prompts.fresh(length, "arrival"), 16))
        gevent.joinall(decoding, raise_error=True)
        return [[one.value for one in decoding], [arrival]]

    return run


def short_behind_long(length: int) -> Workload:
    """Return the workload of a long prompt and, `BEHIND_S` after it and each other, four short ones: 64 in, 16 out."""

    def run(client: StreamClient, prompts: Prompts) -> list[list[Exchange]]:
        long = gevent.spawn(client.ask, prompts.ask("long", prompts.fresh(length, "long"), 16))
        short = []
        for place in range(4):
            gevent.sleep(BEHIND_S)
            short.append(gevent.spawn(client.ask, prompts.ask("short", prompts.fresh(64, f"short {place}"), 16)))
        gevent.joinall([long, *short], raise_error=True)
        return [[one.value for one in short], [long.value]]

    return run


def workloads(context_tokens: int | None) -> dict[tuple[str, ...], Workload]:
    """Return the workloads by the table rows that they fill, their longest prompts cut to a context.

    Raises:
        SystemExit: the context is too short for the other prompts.
    """
    room = LONGEST_TOKENS if context_tokens is None else context_tokens - SPARE_TOKENS
    if room < MIXED_TOKENS:
        raise SystemExit(
            f"loadtest.compare: a context of {context_tokens} tokens is too short; {MIXED_TOKENS} are sent"
        )
    prefix, arrival = min(1024, room - 16 - 32), min(4096, room - 16)
    return {
        ("1 stream, 128 in, 128 out",): one_stream,
        (f"{prefix:,}-token prefix, cold", "same, warm, 4 at once"): shared_prefix(prefix),
        ("8 streams, 32-512 in, 16-256 out",): mixed_streams(8),
        ("32 streams, same",): mixed_streams(32),
        (f"4 decoding while {arrival:,} tokens arrive", "the long prompt itself"): long_arrival(arrival),
        (f"4 short prompts behind {arrival:,} tokens", "the long prompt before them"): short_behind_long(arrival),
    }


COLUMNS = ("workload", "server", "TTFT p50 ms", "TPOT p50 ms", "longest gap ms", "output tokens/s", "errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Medians over the repetitions of one row for one server; NaN where nothing was measured."""

    ttft_ms: float
    tpot_ms: float
    longest_gap_ms: float
    output_tokens_per_s: float
    num_errors: int

    def values(self) -> tuple[float, ...]:
        """Return the four figures in the order of the table."""
        return (self.ttft_ms, self.tpot_ms, self.longest_gap_ms, self.output_tokens_per_s)


def cell_of(rounds: Sequence[Summary]) -> Cell:
    """Return the medians over the repetitions."""
    return Cell(
        ttft_ms=median(one.ttft_ms.p50 for one in rounds),
        tpot_ms=median(one.tpot_ms.p50 for one in rounds),
        longest_gap_ms=median(one.itl_ms.highest for one in rounds),
        output_tokens_per_s=median(one.output_tokens_per_s for one in rounds),
        num_errors=sum(one.num_errors for one in rounds),
    )


def with_ratio(value: float, base: float) -> str:
    """Return a figure, with its ratio to `base` if both were measured."""
    if isnan(value) or isnan(base) or base == 0:
        return number(value)
    return f"{number(value)} ({number(value / base)}x)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Results: row -> server -> cell, and error messages."""

    cell_by_server_by_row: dict[str, dict[str, Cell]]
    errors: tuple[str, ...]

    def to_json(self, **facts: object) -> str:
        """Return the cells as one line, null where nothing was measured, and facts about the run."""
        cells = {
            row: {
                name: {
                    column: None if isnan(value) else value
                    for column, value in zip(COLUMNS[2:], (*cell.values(), cell.num_errors), strict=True)
                }
                for name, cell in cell_by_server.items()
            }
            for row, cell_by_server in self.cell_by_server_by_row.items()
        }
        return json.dumps(facts | {"rows": cells})

    def table(self) -> str:
        """Return the table; ratios are to the first server."""
        rows = []
        for row, cell_by_server in self.cell_by_server_by_row.items():
            first = next(iter(cell_by_server.values()))
            for name, cell in cell_by_server.items():
                pairs = zip(cell.values(), first.values(), strict=True)
                figures = [number(value) if cell is first else with_ratio(value, base) for value, base in pairs]
                rows.append([row, name, *figures, str(cell.num_errors)])
        return markdown_table(COLUMNS, rows)


def compare(
    servers: Sequence[Server],
    *,
    repeats: int,
    seed: int,
    ids: TokenRange,
    ignore_eos: bool,
    words: tuple[str, ...] = (),
    settle_s: float = SETTLE_S,
) -> Comparison:
    """Run every workload on every server, alternating; the first server changes with each repetition."""
    clients = {server.name: StreamClient(server.url, concurrency=MAX_STREAMS) for server in servers}
    contexts = [server.context_tokens for server in servers if server.context_tokens is not None]
    cells: dict[str, dict[str, Cell]] = {}
    errors: set[str] = set()
    for rows, workload in workloads(min(contexts, default=None)).items():
        rounds: dict[str, list[list[Summary]]] = {server.name: [] for server in servers}
        # The first round warms the servers up and is discarded.
        for repeat in range(-1, repeats):
            turn = repeat % len(servers)
            for server in (*servers[turn:], *servers[:turn]):
                name = f"{seed}/{rows[0]}/{repeat}"
                prompts = Prompts(model=server.model, round_name=name, ids=ids, ignore_eos=ignore_eos, words=words)
                gevent.sleep(settle_s)
                found = workload(clients[server.name], prompts)
                if repeat >= 0:
                    errors |= {f"{server.name}, {rows[0]}: {e.error}" for part in found for e in part if e.error}
                    rounds[server.name].append([summarise(part, label=rows[0]) for part in found])
        for place, row in enumerate(rows):
            cells[row] = {name: cell_of([one[place] for one in found]) for name, found in rounds.items()}
    return Comparison(cell_by_server_by_row=cells, errors=tuple(sorted(errors)))


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.compare", description=__doc__)
    parser.add_argument(
        "--url", type=NamedUrl.parse, action="append", required=True, help="[name=]http://host:port, once per server"
    )
    parser.add_argument("--model", help="model to ask everywhere; default: the first base model that a server lists")
    parser.add_argument("--repeats", type=at_least_1, default=2)
    add_token_ids(parser)
    add_seed(parser)
    parser.add_argument("--respect-eos", action="store_true", help="for servers that do not know `ignore_eos`")
    help_text = "send text: words that the tokenizer in this folder has one token for"
    parser.add_argument("--words-of", type=folder_with("tokenizer.json"), help=help_text)
    options = parser.parse_args()
    ids = token_ids(parser, options)
    try:
        words = single_token_words(options.words_of) if options.words_of else ()
    except ValueError as failure:
        parser.error(f"--words-of: {failure}")
    refuse_twice([server.name for server in options.url])
    servers = [find_server(server, options.model) for server in options.url]
    found = compare(
        servers,
        repeats=options.repeats,
        seed=options.seed,
        ids=ids,
        ignore_eos=not options.respect_eos,
        words=words,
    )
    print(found.table())
    print("".join(f"\n{error}" for error in found.errors))
    models = {server.name: server.model for server in servers}
    print(found.to_json(models=models, seed=options.seed, repeats=options.repeats, ignore_eos=not options.respect_eos))


if __name__ == "__main__":
    main()
