"""Measurements of one streamed answer on the client side, and the summary of many.

Pure: standard library only; reads no clock. All times are milliseconds since the request was sent, except `started_s`.

    sent          first text       ...  text events  ...        last text   [DONE]
     |---- ttft ----|-- gap --|-- gap --|                           |         |
                    |------------- tpot x (tokens - 1) -------------|
     |------------------------------ end_ms ----------------------------------|
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its streamed answer.

    Attributes:
        workload: label of the kind of request.
        model: name that was requested.
        started_s: Unix time at which the request was sent.
        status: HTTP status; 0 if there was none.
        error: None if the answer is complete, including the end mark; else a one-line message.
        event_ms: arrival of every event with text. One event may carry several tokens.
        end_ms: arrival of the end of the stream.
        prompt_tokens, cached_tokens, completion_tokens: from the usage chunk. Without one, the first two are 0 and
            `completion_tokens` is the number of text events.
    """

    workload: str
    model: str
    started_s: float
    status: int
    error: str | None
    event_ms: list[float] = field(default_factory=list)
    end_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the whole answer arrived."""
        return self.error is None

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first text, or None if there was no text."""
        return self.event_ms[0] if self.event_ms else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of each output token after the first, or None with fewer than two."""
        if len(self.event_ms) < 2 or self.completion_tokens < 2:
            return None
        return (self.event_ms[-1] - self.event_ms[0]) / (self.completion_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between consecutive text events (inter-token latency, if an event is a token)."""
        return [later - earlier for earlier, later in pairwise(self.event_ms)]

    def as_due(self, late_ms: float) -> Exchange:
        """Return the exchange as seen by a user for whom it was due `late_ms` before it was sent."""
        return replace(
            self,
            started_s=self.started_s - late_ms / 1000,
            event_ms=[time_ms + late_ms for time_ms in self.event_ms],
            end_ms=self.end_ms + late_ms,
        )

    def to_json(self) -> str:
        """Return one line of JSON, times rounded to a microsecond."""
        fields = asdict(self)
        fields["event_ms"] = [round(time_ms, 3) for time_ms in self.event_ms]
        return json.dumps(fields, ensure_ascii=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency objectives for a user of the service; None means no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met_by(self, exchange: Exchange) -> bool:
        """Tell whether the answer is complete and within both bounds; the TPOT bound is skipped for short answers."""
        ttft_ms, tpot_ms = exchange.ttft_ms, exchange.tpot_ms
        if not exchange.is_ok or ttft_ms is None:
            return False
        is_first_in_time = self.ttft_ms is None or ttft_ms <= self.ttft_ms
        return is_first_in_time and (self.tpot_ms is None or tpot_ms is None or tpot_ms <= self.tpot_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Percentiles of one quantity; NaN if there were no values."""

    p50: float
    p90: float
    p99: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Aggregate results of a run.

    Attributes:
        requests_per_s: complete answers that ended within the window, divided by its length.
        output_tokens_per_s: tokens that arrived within the window, divided by its length.
        goodput_per_s: answers within the SLO that ended within the window, divided by its length.
        goodput_share: answers within the SLO, divided by all requests.
    """

    label: str
    num_requests: int
    num_errors: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    goodput_per_s: float
    goodput_share: float
    cached_share: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share (0 to 1) lies, linearly interpolated; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Iterable[float]) -> float:
    """Return the median of the values that are not NaN; NaN if there is none."""
    return percentile([value for value in values if not math.isnan(value)], 0.5)


def spread(values: Iterable[float]) -> Spread:
    """Return the percentiles of the values."""
    found = sorted(values)
    return Spread(
        p50=percentile(found, 0.5),
        p90=percentile(found, 0.9),
        p99=percentile(found, 0.99),
        highest=found[-1] if found else math.nan,
    )


def tokens_by_time(exchange: Exchange, origin_s: float) -> list[tuple[float, float]]:
    """Return (seconds since origin, tokens) of each text event; the answer's tokens are distributed evenly."""
    if not exchange.event_ms:
        return []
    share = max(exchange.completion_tokens, 1) / len(exchange.event_ms)
    offset_s = exchange.started_s - origin_s
    return [(offset_s + time_ms / 1000, share) for time_ms in exchange.event_ms]


def summarise(
    exchanges: Sequence[Exchange], *, label: str, window_s: float | None = None, slo: Slo | None = None
) -> Summary:
    """Summarize the exchanges.

    Args:
        window_s: length of the window for rates, from the first start on; later events count only in latencies. By
            default it ends with the last exchange.

    Raises:
        ValueError: there are no exchanges.
    """
    if not exchanges:
        raise ValueError(f"no request was recorded for {label!r}")
    slo = slo or Slo()
    origin_s = min(exchange.started_s for exchange in exchanges)
    if window_s is None:
        window_s = max(exchange.started_s + exchange.end_ms / 1000 for exchange in exchanges) - origin_s
    window_s = max(window_s, 1e-9)
    end_s = origin_s + window_s
    whole = [exchange for exchange in exchanges if exchange.is_ok]
    in_window = [exchange for exchange in whole if exchange.started_s + exchange.end_ms / 1000 <= end_s + 1e-9]
    tokens = sum(share for e in exchanges for at_s, share in tokens_by_time(e, origin_s) if at_s <= window_s + 1e-9)
    prompt_tokens = sum(exchange.prompt_tokens for exchange in whole)
    return Summary(
        label=label,
        num_requests=len(exchanges),
        num_errors=len(exchanges) - len(whole),
        requests_per_s=len(in_window) / window_s,
        output_tokens_per_s=tokens / window_s,
        ttft_ms=spread(e.ttft_ms for e in whole if e.ttft_ms is not None),
        itl_ms=spread(gap for e in whole for gap in e.gaps_ms),
        tpot_ms=spread(e.tpot_ms for e in whole if e.tpot_ms is not None),
        e2e_ms=spread(e.end_ms for e in whole),
        goodput_per_s=sum(slo.is_met_by(e) for e in in_window) / window_s,
        goodput_share=sum(slo.is_met_by(e) for e in exchanges) / len(exchanges),
        cached_share=sum(e.cached_tokens for e in whole) / prompt_tokens if prompt_tokens else 0.0,
    )


def read_exchanges(path: Path) -> list[Exchange]:
    """Read a file of lines written by `Exchange.to_json`.

    Raises:
        ValueError: a line is something else.
    """
    with path.open(encoding="utf-8") as lines:
        try:
            return [Exchange(**json.loads(line)) for line in lines if line.strip()]
        except (TypeError, ValueError) as failure:
            raise ValueError(f"{path} has a line that is no record: {failure}") from failure
