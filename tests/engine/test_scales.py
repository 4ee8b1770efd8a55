from __future__ import annotations

import pytest

from engine.decoder.families import FAMILIES
from engine.decoder.fields import Fields
from engine.decoder.scales import Scales, parse_scales
from engine.errors import CheckpointError

GEMMA = FAMILIES["Gemma2ForCausalLM"]


def test_a_family_reads_its_own_fields_and_no_others() -> None:
    fields = Fields({"query_pre_attn_scalar": 64, "attn_logit_softcapping": None}, "config.json")
    assert parse_scales(fields, GEMMA, 16) == Scales(scores=1 / 8, embedding=4.0, logit_softcap=30.0)
    assert parse_scales(fields, FAMILIES["LlamaForCausalLM"], 16) == Scales()


def test_granite_multiplies_by_what_its_fields_say() -> None:
    fields = {"attention_multiplier": 0.02, "embedding_multiplier": 12, "residual_multiplier": 0.2, "logits_scaling": 8}
    family = FAMILIES["GraniteForCausalLM"]
    assert parse_scales(Fields(fields, ""), family, 16) == Scales(
        scores=0.02, embedding=12.0, residual=0.2, logits=0.125
    )
    assert parse_scales(Fields({}, ""), family, 16) == Scales(scores=1.0)


def test_a_cap_that_is_no_positive_number_is_named() -> None:
    with pytest.raises(CheckpointError, match="final_logit_softcapping must be a positive number"):
        parse_scales(Fields({"final_logit_softcapping": -1}, "config.json"), GEMMA, 16)
