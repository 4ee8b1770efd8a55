"""Locust user that chats: ask, read the stream to its end, ask again.

Every request adds an entry `chat` to Locust's statistics (end to end; its length is the number of output tokens) and
entries `TTFT`, `ITL` (one for each gap) and `TPOT`; with `--records` also one line to a file.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, TextIO

import gevent  # type: ignore[import-untyped, unused-ignore]
from locust import User, constant, events, task

from loadtest.arguments import slo_of
from loadtest.measure import Exchange
from loadtest.stream_client import StreamClient
from loadtest.users.options import add_options, mix_of
from loadtest.workloads import chat_asks, read_entries

PAUSE_AFTER_ERROR_S = 0.5


class Observer:
    """Sends the exchanges of one process to Locust's statistics, the goodput count and the records file."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._slo = slo_of(environment.parsed_options)
        self._num_asked = 0
        self._num_in_slo = 0
        path = environment.parsed_options.records
        self._records: TextIO | None = Path(path).open("w", encoding="utf-8") if path else None  # noqa: SIM115
        environment.events.quitting.add_listener(self.close)

    def observe(self, exchange: Exchange) -> None:
        """Record one exchange."""
        self._num_asked += 1
        self._num_in_slo += self._slo.is_met_by(exchange)
        if self._records is not None:
            self._records.write(exchange.to_json() + "\n")
        self._fire("chat", exchange.model, exchange.end_ms, exchange.completion_tokens, exchange.error)
        if exchange.ttft_ms is not None:
            self._fire("TTFT", exchange.model, exchange.ttft_ms)
        if exchange.tpot_ms is not None:
            self._fire("TPOT", exchange.model, exchange.tpot_ms)
        for gap_ms in exchange.gaps_ms:
            self._fire("ITL", exchange.model, gap_ms)

    def close(self, **_event: object) -> None:
        """Close the file and print the goodput."""
        if self._records is not None:
            self._records.close()
        if self._num_asked:
            print(f"goodput: {self._num_in_slo} of {self._num_asked} requests inside {self._slo}")

    def _fire(self, kind: str, name: str, time_ms: float, length: int = 0, error: str | None = None) -> None:
        self._environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=time_ms,
            response_length=length,
            exception=RuntimeError(error) if error is not None else None,
            context={},
        )


class ChatUser(User):
    """A user with one open request at a time and no pause between answers."""

    wait_time = constant(0)
    observer: Observer
    _numbers = count()

    def on_start(self) -> None:
        """Connect, and ask the server for its models unless the command line names them."""
        options = self.environment.parsed_options
        self._client = StreamClient(self.host)
        models = options.models or tuple(model.name for model in self._client.models() if model.generates)
        # Otherwise a run with more users would ask again what one with fewer has left in the server's caches.
        seed = f"{options.seed}/{options.num_users}"
        self._asks = chat_asks(mix_of(options, models), read_entries(), seed=seed, user=next(self._numbers))

    def on_stop(self) -> None:
        """Close the connection."""
        self._client.close()

    @task
    def ask(self) -> None:
        """Ask once and read to the end; back off after a failure, so that a refusing server is not asked in a loop."""
        exchange = self._client.ask(next(self._asks))
        self.observer.observe(exchange)
        if not exchange.is_ok:
            gevent.sleep(PAUSE_AFTER_ERROR_S)


@events.init_command_line_parser.add_listener
def _add_our_options(parser: Any) -> None:
    add_options(parser)


@events.init.add_listener
def _observe(environment: Any, **_event: object) -> None:
    ChatUser.observer = Observer(environment)
