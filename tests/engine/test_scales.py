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


def test_a_cap_that_is_no_positive_number_is_named() -> None:
    with pytest.raises(CheckpointError, match="final_logit_softcapping must be a positive number"):
        parse_scales(Fields({"final_logit_softcapping": -1}, "config.json"), GEMMA, 16)
