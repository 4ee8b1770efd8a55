"""Mixture-of-experts settings of config.json: number of experts, experts per token, and which layers have them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.decoder.families import MixtureFields
from engine.decoder.fields import Fields
from engine.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Geometry of the mixture of experts that replaces the MLP in a sparse layer; `kernels.experts` computes it.

    Attributes:
        count: number of experts.
        chosen: number of experts per token (top-k).
        inner_size: intermediate size of each expert.
        is_normed: the router weights of the chosen experts are normalized to sum to 1.
        shared_size: intermediate size of the shared expert, which has a gate of its own; 0 for none.
    """

    count: int
    chosen: int
    inner_size: int
    is_normed: bool
    shared_size: int = 0


def parse_experts(fields: Fields, mixture: MixtureFields) -> ExpertSpec:
    """Parse the geometry.

    Raises:
        CheckpointError: a field is wrong or missing.
    """
    # Different versions of the same family's code write either name.
    known = (name for name in ("num_experts", "num_local_experts") if fields.config.get(name) is not None)
    name = next(known, mixture.count)
    count, chosen = fields.count(name), fields.count("num_experts_per_tok")
    if chosen > count:
        raise CheckpointError(f"{fields.where}: num_experts_per_tok is {chosen}, but {name} is {count}.")
    return ExpertSpec(
        count=count,
        chosen=chosen,
        inner_size=fields.count(mixture.inner),
        is_normed=fields.switch(mixture.is_normed),
        shared_size=0 if mixture.shared is None else fields.count(mixture.shared),
    )


def sparse_layers(fields: Fields, mixture: MixtureFields | None, num_layers: int) -> list[bool]:
    """Return which layers have experts; the others have an MLP.

    Raises:
        CheckpointError: a field is wrong.
    """
    if mixture is None or not mixture.leaves_some_dense:
        return [mixture is not None] * num_layers
    every, dense = fields.count("decoder_sparse_step", 1), fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int or not 0 <= layer < num_layers for layer in dense):
        raise CheckpointError(
            f"{fields.where}: mlp_only_layers must name some of {num_layers} layers, it is {dense!r}."
        )
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers)]
