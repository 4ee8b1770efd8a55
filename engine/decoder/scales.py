"""Scale factors and soft caps of some families, on the embedding, attention scores, residual stream and logits."""

from __future__ import annotations

from dataclasses import dataclass

from engine.decoder.families import Family
from engine.decoder.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scale factors and soft caps of a decoder.

    Attributes:
        scores: factor of attention scores; None for 1 / sqrt(head_dim).
        embedding: factor of embedded tokens, rounded to their dtype.
        residual: factor of each sublayer's output.
        logits: factor of logits.
        score_softcap, logit_softcap: c in c * tanh(x / c), applied to scores and logits; 0 for no cap.
    """

    scores: float | None = None
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    score_softcap: float = 0.0
    logit_softcap: float = 0.0


def parse_scales(fields: Fields, family: Family, hidden_size: int) -> Scales:
    """Parse the fields that the family has.

    Raises:
        CheckpointError: a value is not a positive number.
    """

    def told(name: str) -> float | None:
        default = family.scales.get(name)
        is_told = name in family.scales and fields.config.get(name, default) is not None
        return fields.positive(name, default) if is_told else None

    query = told("query_pre_attn_scalar")
    return Scales(
        scores=told("attention_multiplier") if query is None else query**-0.5,
        embedding=hidden_size**0.5 if family.scales_embedding else told("embedding_multiplier") or 1.0,
        residual=told("residual_multiplier") or 1.0,
        logits=1.0 / (told("logits_scaling") or 1.0),
        score_softcap=told("attn_logit_softcapping") or 0.0,
        logit_softcap=told("final_logit_softcapping") or 0.0,
    )
