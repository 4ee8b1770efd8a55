"""The tables of adapters have room for what a model's adapters may change."""

from __future__ import annotations

from pathlib import Path

from engine.adapter_tables import ENTRIES, entries_of, num_experts_of
from engine.loading.spec import read_model_spec
from tests.engine.fallback.saved import save

EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
BUNDLED = Path(__file__).parents[2] / "models" / "stdlib-chat"


def test_a_family_has_the_usual_entries() -> None:
    spec = read_model_spec(str(BUNDLED))
    assert entries_of(spec) == ENTRIES
    assert num_experts_of(spec) == 0


def test_modules_that_not_every_decoder_has_follow_in_order(tmp_path: Path) -> None:
    spec = read_model_spec(str(save(tmp_path, "FalconH1ForCausalLM")))
    others = ("feed_forward.down_proj", "feed_forward.gate_proj", "feed_forward.up_proj")
    assert entries_of(spec) == (*ENTRIES, *others, "mamba.in_proj", "mamba.out_proj")


def test_experts_of_a_model_that_transformers_computes_are_counted(tmp_path: Path) -> None:
    assert num_experts_of(read_model_spec(str(save(tmp_path, "Glm4MoeForCausalLM", **EXPERTS)))) == 6
