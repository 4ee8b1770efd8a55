"""Prometheus' text format, of numbers that many processes have: each writes its own, whoever is scraped joins them.

    # HELP vllm:prompt_tokens_total Prompt tokens of requests admitted.     head
    # TYPE vllm:prompt_tokens_total counter                                 head
    vllm:prompt_tokens_total{engine="a",model_name="m"} 7.0                 lines

There may be thousands of adapters, each with lines of its own. Bytes travel between processes for next to nothing; as
many objects would hold up a gateway's streams at every scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest


@dataclass(frozen=True, slots=True)
class FamilyText:
    """One family: what it is, and its samples."""

    head: bytes
    lines: bytes


def write(families: Iterable[Metric]) -> dict[str, FamilyText]:
    """Return the text of families by their names; those of one name become one."""
    joined: dict[str, Metric] = {}
    for family in families:
        known = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        # When a counter began is told by its restart; the extra series would double their number.
        known.samples.extend(sample for sample in family.samples if not sample.name.endswith("_created"))
    return {name: _text(family) for name, family in joined.items()}


def join(parts: Iterable[Mapping[str, FamilyText]]) -> bytes:
    """Return the text of all processes; families of one name become one."""
    texts_by_name: dict[str, list[FamilyText]] = {}
    for part in parts:
        for name, text in part.items():
            texts_by_name.setdefault(name, []).append(text)
    return b"".join(texts[0].head + b"".join(text.lines for text in texts) for texts in texts_by_name.values())


def _text(family: Metric) -> FamilyText:
    about, kind, lines = generate_latest(_Collected(family)).split(b"\n", 2)
    return FamilyText(head=about + b"\n" + kind + b"\n", lines=lines)


class _Collected(CollectorRegistry):
    """A family that was collected elsewhere."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """Return it as it is."""
        return iter([self._family])
