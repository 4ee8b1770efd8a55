"""Measure loading adapters on a running server: time to first token, cost of a thousand, fairness under a flood.

    python -m loadtest.adapter_life --url http://127.0.0.1:8000 --admin-key KEY --model-path PATH --folder FOLDER

Starts no server. The server must permit loading from `--folder`, into which random adapters of `--megabytes` that fit
the model are written. Prints medians, and ratios to the same traffic without the load.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Self

from loadtest.arguments import above_0, add_seed, at_least, at_least_1, checkpoint_folder, http_url, make_folder
from loadtest.flood import IDS, flooding
from loadtest.measure import Exchange, percentile, summarise
from loadtest.random_adapter import rank_of_size, write_adapter
from loadtest.servers import NamedUrl, find_server
from loadtest.stream_client import StreamClient
from loadtest.tables import markdown_table, number
from loadtest.workloads import token_ask, token_prompt

COLUMNS = ("case", "value", "target")


class Admin:
    """Client of the admin routes that load adapters; unloads them at the end of its `with` block."""

    def __init__(self, url: str, key: str) -> None:
        self._client = StreamClient(url, timeout_s=60, api_key=key)
        self._loaded: list[str] = []

    def load(self, name: str, folder: Path) -> None:
        """Serve the adapter in a folder under a name."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        self._client.post("/v1/load_lora_adapter", body)
        self._loaded.append(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        while self._loaded:
            self._client.post("/v1/unload_lora_adapter", {"lora_name": self._loaded.pop()})


def checked(exchange: Exchange) -> Exchange:
    """Return the exchange if its answer is complete and has text.

    Raises:
        SystemExit: it failed, or has none.
    """
    if exchange.error is not None or not exchange.event_ms:
        raise SystemExit(f"loadtest.adapter_life: {exchange.model}: {exchange.error or 'an answer without text'}")
    return exchange


def first_token_ms(client: StreamClient, admin: Admin, folder: Path, *, name: str) -> tuple[float, float]:
    """Load a new adapter and request it; return the ms until the load was answered and until the first token."""
    ask = token_ask(name, token_prompt(32, seed=name, ids=IDS), 4, workload="new")
    started_s = time.perf_counter()
    admin.load(name, folder)
    loaded_ms = (time.perf_counter() - started_s) * 1000
    return loaded_ms, loaded_ms + checked(client.ask(ask)).event_ms[0]


def throughput(client: StreamClient, model: str, *, streams: int, name: str) -> float:
    """Return the output tokens/s of concurrent streams."""
    asks = [
        token_ask(model, token_prompt(128, seed=f"{name}/{place}", ids=IDS), 128, workload=name)
        for place in range(streams)
    ]
    exchanges = [checked(exchange) for exchange in client.ask_together(asks)]
    return summarise(exchanges, label=name).output_tokens_per_s


def light_ttft_ms(client: StreamClient, model: str, *, count: int, name: str) -> list[float]:
    """Return the TTFTs of requests that one tenant sends sequentially."""
    found = []
    for place in range(count):
        ask = token_ask(model, token_prompt(64, seed=f"{name}/{place}", ids=IDS), 16, workload=name)
        found.append(checked(client.ask(ask)).event_ms[0])
    return found


def new_adapters(client: StreamClient, admin: Admin, options: argparse.Namespace) -> list[list[str]]:
    """Load new adapters, request each immediately, and return table rows; they stay loaded as `life-<i>`."""
    times = []
    rank = rank_of_size(options.model_path, int(options.megabytes * 1e6))
    for repeat in range(options.repeats):
        folder = options.folder / f"life-{repeat}"
        write_adapter(folder, options.model_path, rank=rank, seed=time.time_ns() % 2**31)
        times.append(first_token_ms(client, admin, folder, name=f"life-{repeat}"))
    label = f"new adapter of {options.megabytes:g} MB (rank {rank})"
    first = [first for _, first in times]
    return [
        [f"{label}: load answered, ms", number(median(loaded for loaded, _ in times)), ""],
        [f"{label}: first token, ms, median", number(median(first)), "< 200"],
        [f"{label}: first token, ms, p95", number(percentile(first, 0.95)), ""],
    ]


def flood(client: StreamClient, options: argparse.Namespace) -> list[list[str]]:
    """Measure `life-0` alone and during a flood of requests to `life-1`, and return table rows."""
    alone = light_ttft_ms(client, "life-0", count=20, name="alone")
    with flooding(options.url, "life-1", options.flood_streams):
        flooded = light_ttft_ms(client, "life-0", count=20, name="flooded")
    label = f"beside {options.flood_streams} streams of another"
    return [
        ["light tenant alone: TTFT p50, ms", number(median(alone)), ""],
        [f"{label}: TTFT p50, ms", number(median(flooded)), ""],
        [f"{label}: of what it is alone", number(median(flooded) / median(alone)), "< 1.5"],
    ]


def thousand(client: StreamClient, admin: Admin, base: str, options: argparse.Namespace) -> list[list[str]]:
    """Measure the base model before and after many adapters are registered, and return table rows."""
    rounds = [f"{options.seed}/{repeat}" for repeat in range(options.repeats)]
    before = [throughput(client, base, streams=8, name=f"before/{name}") for name in rounds]
    small = options.folder / "life-small"
    write_adapter(small, options.model_path, rank=1, seed=1)
    started_s = time.perf_counter()
    for index in range(options.registered):
        admin.load(f"life-n{index}", small)
    each_ms = (time.perf_counter() - started_s) * 1000 / max(1, options.registered)
    after = [throughput(client, base, streams=8, name=f"after/{name}") for name in rounds]
    label = f"base alone with {options.registered} registered: of before"
    return [
        [f"registering {options.registered}: ms for each", number(each_ms), ""],
        [label, number(median(after) / median(before)), "1 ± 0.01"],
    ]


def show(rows: list[list[str]]) -> None:
    """Print a table of what has been measured, as what comes after it may fail."""
    print(f"{markdown_table(COLUMNS, rows)}\n", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.adapter_life", description=__doc__)
    parser.add_argument("--url", type=http_url, required=True, help="http://host:port")
    parser.add_argument("--admin-key", required=True)
    parser.add_argument("--model-path", type=checkpoint_folder, required=True, help="checkpoint of the base model")
    parser.add_argument("--folder", required=True, type=Path, help="a folder that the server may load from")
    parser.add_argument("--megabytes", type=above_0, default=8.0)
    parser.add_argument("--repeats", type=at_least(2), default=10)
    parser.add_argument("--registered", type=at_least(0), default=1000)
    parser.add_argument("--flood-streams", type=at_least_1, default=80)
    add_seed(parser)
    options = parser.parse_args()
    make_folder(options.folder)
    base = find_server(NamedUrl(name="the server", url=options.url), None).model
    client = StreamClient(options.url, concurrency=8)
    try:
        with Admin(options.url, options.admin_key) as admin:
            show(new_adapters(client, admin, options))
            show(flood(client, options))
            show(thousand(client, admin, base, options))
    except (OSError, RuntimeError) as failure:
        raise SystemExit(f"loadtest.adapter_life: {failure}") from failure


if __name__ == "__main__":
    main()
