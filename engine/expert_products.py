"""The products of a layer's experts, which an `engine.backend.Backend` lays out, and what it lays out."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch

from engine.loading.weight import Weight
from engine.lora import LoraBatch, LoraProducts
from kernels.experts.reference import Change


class MixtureProduct(Protocol):
    """A layer's mixture of experts."""

    def __call__(self, h: torch.Tensor, lora: LoraProducts | None = None, layer: int = 0) -> torch.Tensor:
        """Return the residual update [tokens, hidden], a new tensor, for normalized states `h` [tokens, hidden].

        Args:
            lora: as returned by `Backend.lora`; its adapters' matrices for experts of the layer are applied.
        """
        ...


ExpertBiases = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Biases of the router [experts], of gate and up [experts, 2 * inner], and of down [experts, hidden]."""


class ExpertWeights(NamedTuple):
    """The weights of a layer's mixture of experts as the checkpoint stores them.

    Attributes:
        router: [experts, hidden], never quantized.
        gate_up: [experts, 2 * inner, hidden], or if quantized [experts * 2 * inner, hidden] with the experts' rows
            stacked. `engine.loading.weight.split` splits either by expert.
        down: likewise [experts, hidden, inner].
        biases: None for none.
    """

    router: torch.Tensor
    gate_up: Weight
    down: Weight
    biases: ExpertBiases | None = None


class RoutedExperts(Protocol):
    """A layer's experts, without a router."""

    def __call__(
        self,
        h: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        decodes: torch.Tensor | None,
        lora: LoraProducts | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [tokens, hidden].

        Args:
            h: [tokens, hidden], contiguous.
            experts: integers [tokens, chosen], different ones for each token.
            weights: floats [tokens, chosen].
            decodes: the leading single-token rows of a step, as in `engine.attention.AttentionBatch.rows`; rows of no
                tokens pad a recorded step, and what is returned for them is undefined. None if all rows are tokens.
            lora, layer: as in `MixtureProduct`.
        """
        ...


def expert_change(lora: LoraProducts | None, layer: int) -> Change | None:
    """Return what changes the products of a layer's experts, by torch's operators; None if nothing does."""
    return partial(lora.change_expert, layer) if isinstance(lora, LoraBatch) and lora.has_experts else None
