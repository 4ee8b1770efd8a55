from __future__ import annotations

from pathlib import Path

import pytest

from adapters.weights import FUSED_GROUPS
from engine.decoder.decoder import GATE_UP, QKV
from engine.decoder.reading import read_spec
from engine.loading.names import parameters
from tests.engine.checkpoint_folder import write_config


def test_projections_of_one_input_are_stacked_in_the_order_of_adapters(tmp_path: Path) -> None:
    by_name = {p.name: p for p in parameters(read_spec(write_config(tmp_path)))}
    assert by_name["layers.1.qkv.weight"].parts == (
        ("model.layers.1.self_attn.q_proj.weight", (16, 16)),
        ("model.layers.1.self_attn.k_proj.weight", (8, 16)),
        ("model.layers.1.self_attn.v_proj.weight", (8, 16)),
    )
    assert by_name["layers.1.qkv.weight"].shape == (32, 16)
    assert (QKV, GATE_UP) == FUSED_GROUPS


def test_what_a_checkpoint_has_as_one_module_is_one_part(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path, architectures=["Phi3ForCausalLM"]))
    by_name = {p.name: p for p in parameters(spec)}
    assert by_name["layers.1.qkv.weight"].parts == (("model.layers.1.self_attn.qkv_proj.weight", (32, 16)),)
    assert by_name["layers.1.gate_up.weight"].parts == (("model.layers.1.mlp.gate_up_proj.weight", (48, 16)),)
    assert "model.layers.1.self_attn.qkv_proj" in spec.module_shapes()


def test_norms_that_checkpoints_tell_from_1_on_are_float32(tmp_path: Path) -> None:
    by_name = {p.name: p for p in parameters(read_spec(write_config(tmp_path, architectures=["Gemma3ForCausalLM"])))}
    norms = ("input_norm", "o_norm", "mlp_norm", "down_norm", "q_norm", "k_norm")
    for name in ("norm", *(f"layers.1.{norm}" for norm in norms)):
        assert (by_name[name].offset, by_name[name].is_wide) == (1.0, True)
    assert not by_name["layers.1.o.weight"].is_wide


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tied_decoder_has_no_head_of_its_own(tmp_path: Path, is_tied: bool) -> None:
    names = {p.name for p in parameters(read_spec(write_config(tmp_path, tie_word_embeddings=is_tied)))}
    assert ("head" in names) is not is_tied


def test_a_bias_is_a_parameter_only_where_there_is_one(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path, architectures=["Qwen2ForCausalLM"]))
    by_name = {p.name: p for p in parameters(spec)}
    assert by_name["layers.0.qkv.bias"].shape == (32,)
    assert "layers.0.o.bias" not in by_name
    assert len(by_name) == len(list(parameters(spec))), "a name is given twice"
