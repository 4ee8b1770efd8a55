"""The model names that clients may use, and what each refers to."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.catalogue import AdapterVersion
from adapters.identity import AdapterRef
from deployments.classifiers.reranking import Rerankers
from deployments.config import GatewayConfig, ModelConfig
from deployments.errors import unknown_model
from deployments.generation import ModelCard
from deployments.registry.adapter_directory import AdapterDirectory


class ServedNames:
    """The base models, adapters and cross-encoders that are served now, by name."""

    def __init__(self, config: GatewayConfig, adapters: AdapterDirectory, rerankers: Rerankers) -> None:
        self._model_by_name = {model.name: model for model in config.models}
        self._created_s = config.created_s
        self._adapters = adapters
        self._rerankers = rerankers
        self._cards: tuple[tuple[str, int], Sequence[ModelCard]] | None = None
        """The last list, and the revision of the adapters in it."""

    def target(self, name: str, draw: float = 0.0) -> tuple[ModelConfig, AdapterRef | None]:
        """Return the base model of a name and, of an adapter, the version; with a traffic split, chosen by its share.

        Args:
            draw: number in [0, 1) that chooses it.

        Raises:
            RequestError: the name is unknown.
        """
        if name in self._model_by_name:
            return self._model_by_name[name], None
        found = self._adapters.find(name, draw)
        if found is None:
            raise unknown_model(name)
        entry, version = found
        return self._model_by_name[entry.base], version.ref

    def has(self, name: str) -> bool:
        """Tell whether something is served under a name."""
        return name in self._model_by_name or self._reranker(name) is not None or self._adapters.find(name) is not None

    def card(self, name: str) -> ModelCard | None:
        """Return what `/v1/models/{name}` shows; the name may also be a version, by number or as the latest."""
        if name in self._model_by_name:
            return self._card(self._model_by_name[name], name)
        if (reranker := self._reranker(name)) is not None:
            return reranker
        if (found := self._adapters.find(name)) is None:
            return None
        entry, version = found
        return self._card(self._model_by_name[entry.base], name, entry.latest if name == entry.name else version)

    def cards(self) -> Sequence[ModelCard]:
        """Return what `/v1/models` shows: bases before their adapters, and cross-encoders last. From any thread."""
        # Read before the entries: a list that is newer than its revision is only made again.
        revision, known = self._adapters.revision, self._cards
        if known is None or known[0] != revision:
            known = self._cards = revision, self._list()
        return known[1]

    def _list(self) -> Sequence[ModelCard]:
        cards = []
        entries = self._adapters.entries()
        for model in self._model_by_name.values():
            cards.append(self._card(model, model.name))
            cards += [
                self._card(model, entry.name, entry.latest)
                for entry in entries
                if entry.base == model.name and entry.split
            ]
        return (*cards, *self._rerankers.cards(self._created_s))

    def _reranker(self, name: str) -> ModelCard | None:
        return next((card for card in self._rerankers.cards(self._created_s) if card.name == name), None)

    def _card(self, model: ModelConfig, name: str, version: AdapterVersion | None = None) -> ModelCard:
        return ModelCard(
            name=name,
            parent=None if version is None else model.name,
            created_s=(version.created_s if version else 0) or self._created_s,
            max_model_len=model.max_model_len,
            task="generate" if model.generates else "embed",
        )
