"""Metrics of many processes in Prometheus text format: each process writes its own, the scraped gateway joins them.

    # HELP vllm:prompt_tokens_total Prompt tokens of requests admitted.     head
    # TYPE vllm:prompt_tokens_total counter                                 head
    vllm:prompt_tokens_total{engine="a",model_name="m"} 7.0                 lines

There may be thousands of adapters, each with its own lines. Bytes are cheap to pass between processes; as many objects
would delay a gateway's streams at every scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Metric, generate_latest


@dataclass(frozen=True, slots=True)
class FamilyText:
    """The text of one metric family: its HELP and TYPE lines, and its samples."""

    head: bytes
    lines: bytes


def write(families: Iterable[Metric]) -> dict[str, FamilyText]:
    """Return the text of metric families by name; families of one name are merged."""
    joined: dict[str, Metric] = {}
    for family in families:
        known = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        # A counter's reset shows that it restarted; series of creation times would double the number of series.
        known.samples.extend(sample for sample in family.samples if not sample.name.endswith("_created"))
    return {name: _text(family) for name, family in joined.items()}


def join(parts: Iterable[Mapping[str, FamilyText]]) -> bytes:
    """Return the joined text of all processes; families of one name are merged."""
    texts_by_name: dict[str, list[FamilyText]] = {}
    for part in parts:
        for name, text in part.items():
            texts_by_name.setdefault(name, []).append(text)
    return b"".join(texts[0].head + b"".join(text.lines for text in texts) for texts in texts_by_name.values())


def _text(family: Metric) -> FamilyText:
    about, kind, lines = generate_latest(_Collected(family)).split(b"\n", 2)
    return FamilyText(head=about + b"\n" + kind + b"\n", lines=lines)


class _Collected(NamedTuple):
    """A collector of one family that was collected elsewhere."""

    family: Metric

    def collect(self) -> Iterable[Metric]:
        return iter([self.family])
