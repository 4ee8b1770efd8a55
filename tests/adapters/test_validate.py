from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.errors import AdapterError
from adapters.peft_format import parse_config
from adapters.tensor_file import read_tensor_file
from adapters.validate import AdaptedModule, ModuleShapes, validate
from tests.adapters.handmade import SHAPES, make_config, make_tensors, write

A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = A0.replace("lora_A", "lora_B")


def check(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    max_rank: int = 64,
    shapes: ModuleShapes = SHAPES,
) -> dict[tuple[int, str], AdaptedModule]:
    entries = read_tensor_file("demo", write(folder, config, tensors)).entry_by_name
    return validate("demo", parse_config("demo", json.dumps(config).encode()), entries, shapes, max_rank)


def test_an_adapter_that_fits_gives_each_module_its_place(tmp_path: Path) -> None:
    targets = ("q_proj", "down_proj")
    layouts = check(tmp_path, make_config(target_modules=targets, lora_alpha=2), make_tensors(targets))
    assert set(layouts) == {(0, "q_proj"), (1, "q_proj"), (0, "down_proj"), (1, "down_proj")}
    assert layouts[(1, "down_proj")].scaling == 0.5
    assert layouts[(1, "down_proj")].a.shape == (4, 24)


@pytest.mark.parametrize("module", ["linear_attn.in_proj_qkv", "self_attn.gate_proj", "mlp.shared_experts.up_proj"])
def test_a_module_that_only_this_base_has_keeps_its_path(tmp_path: Path, module: str) -> None:
    shapes = SHAPES | {f"model.layers.1.{module}": (16, 24)}
    at = f"base_model.model.model.layers.1.{module}"
    tensors = {f"{at}.lora_A.weight": torch.ones(4, 16), f"{at}.lora_B.weight": torch.ones(24, 4)}
    layouts = check(tmp_path, make_config(target_modules=[module]), tensors, shapes=shapes)
    assert set(layouts) == {(1, module)}
    with pytest.raises(AdapterError, match=rf"no module 'model\.layers\.1\.{module}' that takes an adapter"):
        check(tmp_path, make_config(target_modules=[module]), tensors)


@pytest.mark.parametrize("name", ["mlp.experts.up_proj", "self_attn.q_proj.bias"])
def test_what_has_a_shape_but_is_no_module_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    module = f"model.layers.1.{name}"
    shapes = SHAPES | {"model.layers.1.mlp.experts.up_proj": (2, 16, 24), "model.layers.1.self_attn.q_proj.bias": (16,)}
    tensors = {f"base_model.model.{module}.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    with pytest.raises(AdapterError, match="that takes an adapter"):
        check(tmp_path, make_config(target_modules=[name]), tensors, shapes=shapes)


def test_one_layer_alone_may_be_adapted(tmp_path: Path) -> None:
    tensors = {key: value for key, value in make_tensors().items() if "layers.1" in key}
    assert set(check(tmp_path, make_config(layers_to_transform=[1]), tensors)) == {(1, "q_proj")}


def test_one_that_was_trained_on_the_decoder_alone_fits_too(tmp_path: Path) -> None:
    tensors = {key.replace(".model.layers", ".layers"): value for key, value in make_tensors().items()}
    config = make_config(target_modules=r"layers\.\d\.self_attn\.q_proj", alpha_pattern={r"^layers\.1\..*": 2})
    layouts = check(tmp_path, config, tensors)
    assert {key: (layout.module, layout.scaling) for key, layout in layouts.items()} == {
        (0, "q_proj"): ("model.layers.0.self_attn.q_proj", 2),
        (1, "q_proj"): ("model.layers.1.self_attn.q_proj", 0.5),
    }


@pytest.mark.parametrize("decoder", ["model.language_model.", "language_model.model."])
def test_one_that_was_trained_on_a_model_that_sees_fits_too(tmp_path: Path, decoder: str) -> None:
    tensors = {key.replace("model.layers", f"{decoder}layers"): value for key, value in make_tensors().items()}
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(4, 16)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.ones(32, 4)
    targets = rf"{decoder}layers\.\d\.self_attn\.q_proj|.*lm_head"
    layouts = check(tmp_path, make_config(target_modules=targets), tensors)
    assert {layout.module for layout in layouts.values()} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "lm_head",
    }


@pytest.mark.parametrize("at", ["model.", ""])
def test_one_that_changes_what_sees_is_refused(tmp_path: Path, at: str) -> None:
    module = f"base_model.model.{at}vision_tower.encoder.layers.0.self_attn.q_proj"
    with pytest.raises(AdapterError, match=r"vision_tower\.encoder"):
        check(tmp_path, make_config(), make_tensors() | {f"{module}.lora_A.weight": torch.ones(4, 8)})


def test_names_without_the_prefix_are_the_same(tmp_path: Path) -> None:
    tensors = {key.removeprefix("base_model.model."): value for key, value in make_tensors().items()}
    assert {layout.module for layout in check(tmp_path, make_config(), tensors).values()} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    }
    with pytest.raises(AdapterError, match="two tensors for the lora_"):
        check(tmp_path, make_config(), make_tensors() | tensors)


def broken(change: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config, tensors = make_config(), make_tensors()
    if change == "no tensors":
        tensors = {}
    elif change == "half":
        del tensors[B0]
    elif change == "in features":
        tensors[A0] = torch.zeros(4, 17)
    elif change == "out features":
        tensors[B0] = torch.zeros(15, 4)
    elif change == "vector":
        tensors[A0] = torch.zeros(64)
    elif change == "rank":
        config["r"] = 8
    elif change == "layer":
        tensors[A0.replace("layers.0", "layers.9")] = tensors.pop(A0)
    elif change == "module":
        tensors[A0.replace("q_proj", "x_proj")] = tensors.pop(A0)
    elif change == "path":
        tensors[A0.replace("self_attn", "mlp")] = tensors.pop(A0)
    elif change == "untargeted":
        config["target_modules"] = ["v_proj"]
    elif change == "missing module":
        config["target_modules"] = ["q_proj", "v_proj"]
    return config, tensors


Q0 = "model.layers.0.self_attn.q_proj"
EMBEDDING = {"model.embed_tokens.lora_embedding_A": (4, 32), "model.embed_tokens.lora_embedding_B": (16, 4)}
ROWS = {"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 16)}
HEAD_ROWS = {"lm_head.token_adapter.trainable_tokens_delta": (2, 16)}
SCORE = {"score.weight": (3, 16)}
HEAD = {"lm_head.lora_A.weight": (4, 16), "lm_head.lora_B.weight": (32, 4)}


def changed(added: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return make_tensors() | {f"base_model.model.{key}": torch.zeros(shape) for key, shape in added.items()}


@pytest.mark.parametrize(
    ("config", "added", "key"),
    [
        ({"bias": "all"}, {f"{Q0}.base_layer.bias": (16,)}, (0, "q_proj")),
        ({"target_modules": ["q_proj", "lm_head"]}, HEAD | {"lm_head.base_layer.weight": (32, 16)}, (-1, "lm_head")),
        ({"target_modules": ["q_proj", "embed_tokens"]}, EMBEDDING, (-1, "embed_tokens")),
        ({"modules_to_save": ["model.norm"]}, {"model.norm.weight": (16,)}, (-1, "norm")),
        ({"modules_to_save": ["embed_tokens"]}, {"model.embed_tokens.weight": (32, 16)}, (-1, "embed_tokens")),
        ({"modules_to_save": ["lm_head"]}, {"lm_head.weight": (32, 16)}, (-1, "lm_head")),
        ({"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}, SCORE, (-1, "score")),
        ({"task_type": "SEQ_CLS", "modules_to_save": ["score"]}, {"score.weight": (1, 16)}, (-1, "score")),
        ({"task_type": "SEQ_CLS", "modules_to_save": ["classifier"]}, {"score.weight": (1024, 16)}, (-1, "score")),
        (
            {"task_type": "SEQ_CLS", "modules_to_save": ["score", "model.norm"]},
            SCORE | {"model.norm.weight": (16,)},
            (-1, "norm"),
        ),
        (
            {"modules_to_save": ["lm_head"], "use_dora": True},
            {"lm_head.weight": (32, 16)}
            | {f"model.layers.{layer}.self_attn.q_proj.lora_magnitude_vector": (16,) for layer in (0, 1)},
            (-1, "lm_head"),
        ),
        ({"ensure_weight_tying": True}, {}, (0, "q_proj")),
        ({"trainable_token_indices": [31, 0]}, ROWS, (-1, "embed_tokens")),
        ({"trainable_token_indices": [1, 2], "ensure_weight_tying": True}, ROWS, (-1, "embed_tokens")),
        (
            {"trainable_token_indices": [1, 2]},
            ROWS | {"model.embed_tokens.token_adapter.base_layer.weight": (32, 16)},
            (-1, "embed_tokens"),
        ),
        ({"trainable_token_indices": {"lm_head": [1, 2]}}, HEAD_ROWS, (-1, "lm_head")),
        ({"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]}}, ROWS, (-1, "embed_tokens")),
        ({"trainable_token_indices": [1, 2], "target_modules": ["q_proj", "lm_head"]}, ROWS | HEAD, (-1, "lm_head")),
    ],
)
def test_biases_embeddings_norms_and_the_head_have_their_places(
    tmp_path: Path, config: dict[str, Any], added: dict[str, tuple[int, ...]], key: tuple[int, str]
) -> None:
    assert key in check(tmp_path, make_config(**config), changed(added))


@pytest.mark.parametrize(
    ("config", "added", "word"),
    [
        ({}, {f"{Q0}.bias": (16,)}, "bias setting is 'none'"),
        ({"bias": "all"}, {"model.layers.1.self_attn.q_proj.bias": (16,)}, "in the base model it has none"),
        ({"bias": "all"}, {f"{Q0}.bias": (15,)}, r"shape \[15\]"),
        ({"bias": "all"}, {f"{Q0}.bias": (16,), f"{Q0}.base_layer.bias": (16,)}, "two tensors"),
        ({}, {f"{Q0}.lora_B.bias": (16,)}, "against its lora_bias"),
        ({"lora_bias": True}, {}, r"lacks its lora_B\.bias"),
        ({"use_dora": True}, {}, "lacks its lora_magnitude_vector"),
        ({"use_dora": True, "target_modules": ["embed_tokens"]}, EMBEDDING, "lacks its lora_magnitude_vector"),
        ({"lora_bias": True, "target_modules": ["embed_tokens"]}, EMBEDDING, "lora_bias of model.embed_tokens"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, {}, "target_modules name model.embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True}, HEAD, "ensure_weight_tying"),
        (
            {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            {"model.embed_tokens.weight": (32, 16), "lm_head.weight": (32, 16)},
            "ensure_weight_tying",
        ),
        ({}, {"model.norm.weight": (16,)}, "modules_to_save do not name"),
        ({"modules_to_save": ["q_proj"]}, {f"{Q0}.weight": (16, 16)}, "a weight of"),
        ({"modules_to_save": ["model.norm"]}, {}, "modules_to_save name model.norm"),
        ({"modules_to_save": ["score"]}, {}, "'score', which is neither"),
        ({"task_type": "SEQ_CLS"}, SCORE, "a weight for score, which its modules_to_save do not name"),
        ({"modules_to_save": ["score"]}, SCORE, "its task_type is ''; only 'SEQ_CLS'"),
        ({"task_type": "TOKEN_CLS", "modules_to_save": ["score"]}, SCORE, "its task_type is 'TOKEN_CLS'"),
        ({"task_type": "SEQ_CLS", "modules_to_save": ["score", "q_x"]}, SCORE, "'q_x', which is neither"),
        *(
            ({"task_type": "SEQ_CLS", "modules_to_save": ["score"]}, {"score.weight": shape}, "needs 16 columns, and 1")
            for shape in ((3, 15), (1025, 16), (16,), (1, 3, 16))
        ),
        (
            {"modules_to_save": ["lm_head"]},
            {"lm_head.weight": (33, 16)},
            r"shape \[33, 16\], and .*; tokens that were added for the adapter are not supported",
        ),
        (
            {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "lm_head"]},
            HEAD | {"lm_head.weight": (32, 16)},
            "both",
        ),
        ({}, ROWS, "which trainable_token_indices do not name"),
        ({"trainable_token_indices": [1, 2]}, {}, "tokens of model.embed_tokens, for which it has no rows"),
        ({"trainable_token_indices": [1]}, ROWS, r"shape \[2, 16\], and the base model needs \[1, 16\]"),
        ({"trainable_token_indices": [1, 32]}, ROWS, "name 32, and .* tokens that were added"),
        (
            {"trainable_token_indices": {"lm_head": [1, 2]}, "alora_invocation_tokens": [3]},
            HEAD_ROWS,
            "or tokens is not supported with alora_invocation_tokens",
        ),
        ({"trainable_token_indices": {"k_proj": [1, 2]}}, ROWS, "'k_proj', which is neither embed_tokens nor lm_head"),
        ({"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [3]}}, ROWS, "tokens of lm_head"),
        (
            {"trainable_token_indices": [1, 2], "target_modules": ["q_proj", "embed_tokens"]},
            ROWS | EMBEDDING,
            "changes all of it besides",
        ),
        (
            {"trainable_token_indices": [1, 2], "modules_to_save": ["embed_tokens"]},
            ROWS | {"model.embed_tokens.weight": (32, 16)},
            "changes all of it besides",
        ),
    ],
)
def test_what_no_setting_tells_of_and_what_is_not_done_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], added: dict[str, tuple[int, ...]], word: str
) -> None:
    tensors = changed(added)
    if config.get("target_modules") == ["embed_tokens"]:
        tensors = {key: value for key, value in tensors.items() if "embed" in key}
    with pytest.raises(AdapterError, match=word):
        check(tmp_path, make_config(**config), tensors)


def test_a_base_that_transformers_computes_takes_no_classifier(tmp_path: Path) -> None:
    config = make_config(task_type="SEQ_CLS", modules_to_save=["score"])
    shapes = {name: shape for name, shape in SHAPES.items() if name.startswith("model.layers.")}
    with pytest.raises(AdapterError, match="not supported for a base that transformers computes"):
        check(tmp_path, config, changed(SCORE), shapes=shapes)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("no tensors", "no tensors"),
        ("half", "lacks its lora_B"),
        ("in features", r"shape \[4, 17\], and the base model needs \[4, 16\]"),
        ("out features", r"shape \[15, 4\], and the base model needs \[16, 4\]"),
        ("vector", r"shape \[64\]"),
        ("rank", r"shape \[4, 16\], and the base model needs \[8, 16\] at the rank in its configuration"),
        ("layer", "layers.9"),
        ("module", "x_proj"),
        ("path", r"mlp\.q_proj"),
        ("untargeted", "target_modules do not name"),
        ("missing module", "no tensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path, change: str, word: str) -> None:
    with pytest.raises(AdapterError, match=word):
        check(tmp_path, *broken(change))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"alora_invocation_tokens": [3, 32]}, "the token 32, and the base model has 32"),
        ({"alora_invocation_tokens": [31], "target_modules": ["q_proj", "embed_tokens"]}, "an adapter of embed_tokens"),
    ],
)
def test_what_activates_an_adapter_is_in_the_vocabulary_and_no_embedding_changes(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    embedding = "base_model.model.model.embed_tokens.lora_embedding_"
    ends = {f"{embedding}A": torch.ones(4, 32), f"{embedding}B": torch.ones(16, 4)}
    tensors = make_tensors() | (ends if "target_modules" in changes else {})
    with pytest.raises(AdapterError, match=word):
        check(tmp_path, make_config(**changes), tensors)
    check(tmp_path, make_config(alora_invocation_tokens=[31]), make_tensors())


def test_a_rank_over_the_bound_is_refused_naming_both(tmp_path: Path) -> None:
    assert check(tmp_path, make_config(), make_tensors(), max_rank=4)
    with pytest.raises(AdapterError, match="rank 4, more than the 3"):
        check(tmp_path, make_config(), make_tensors(), max_rank=3)
    with pytest.raises(AdapterError, match="rank 300, more than the 64"):
        check(tmp_path, make_config(rank_pattern={"q_proj": 300}), make_tensors())


def test_more_tokens_than_half_of_the_highest_rank_are_refused_naming_both(tmp_path: Path) -> None:
    config, tensors = make_config(trainable_token_indices=[1, 2]), changed(ROWS)
    assert check(tmp_path, config, tensors, max_rank=4)[-1, "embed_tokens"].tokens == (1, 2)
    with pytest.raises(
        AdapterError, match="name 3 tokens, more than the 2 that this server takes, half of the highest"
    ):
        check(tmp_path, config | {"trainable_token_indices": [1, 2, 3]}, tensors, max_rank=5)
