"""Adapters of a mixture's experts, mixed with others in one batch, against peft, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.registry import reference
from engine.build import build_engine
from engine.config import EngineConfig
from kernels import native
from tests.parity.conftest import Checkpoint, greedy, make_model, random_prompts, run_engine
from tests.parity.gpu_parts import Replays, config_of
from tests.parity.peft_adapters import BESIDE_EXPERTS, OF_EXPERTS, save_beyond_products

BESIDE = {"attention": BESIDE_EXPERTS["attention"]}
BLOCK_BY_FAMILY = {"granite-moe": "block_sparse_moe"}
ROUTER_BY_FAMILY = {"granite-moe": "router.layer.weight", "gpt-oss": "router.weight"}
ALL_LINEAR = ("qwen3-moe", "mixtral", "olmoe")
"""Families in which PEFT counts routers and experts among all linear modules."""
LETTERS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(params=["kernels", "operators"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Our own kernels, or torch's operators as where there is no compiler."""
    if request.param == "operators":
        monkeypatch.setattr("kernels.native.load", lambda: None)
    else:
        assert native.load() is not None
    return str(request.param)


def configs_for(family: str) -> dict[str, dict[str, Any]]:
    """Name the block of the family's mixtures."""
    block, router = BLOCK_BY_FAMILY.get(family, "mlp"), ROUTER_BY_FAMILY.get(family, "gate.weight")
    found = {name: dict(options) for name, options in OF_EXPERTS.items()}
    if family in ALL_LINEAR:
        found["all-linear"] = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}
    for options in (options for options in found.values() if "target_parameters" in options):
        named = [name.replace("mlp", block).replace("gate.weight", router) for name in options["target_parameters"]]
        options["target_parameters"] = named
    return BESIDE | found


def generated(family: str, base: Checkpoint, path: str, prompt: tuple[int, ...]) -> list[int]:
    """What peft generates by an adapter on a base of its own."""
    model = peft.PeftModel.from_pretrained(make_model(family), path).eval()
    return Checkpoint(path=f"{base.path}/{path}", model=model).generate(prompt)


def check(
    family: str, base: Checkpoint, path_by_name: dict[str, str], expected_by: dict[str, str], **options: Any
) -> None:
    """Ask each adapter and the base twice, all in one batch; `expected_by` are what peft is given for them."""
    adapters = [reference(name, path) for name, path in path_by_name.items()]
    prompts = random_prompts(2 * len(adapters) + 2, longest=40)
    expected, requests = {}, []
    for number, prompt in enumerate(prompts):
        adapter = adapters[number // 2] if number // 2 < len(adapters) else None
        name = f"{'base' if adapter is None else adapter.name} {number}"
        expected[name] = (
            base.generate(prompt) if adapter is None else generated(family, base, expected_by[adapter.name], prompt)
        )
        requests.append(greedy(name, prompt, adapter=None if adapter is None else adapter.digest))
    plain = {name: base.generate(prompt) for name, prompt in zip(expected, prompts, strict=True)}
    changed = [name for name in expected if expected[name] != plain[name]]
    assert len(changed) > len(adapters), "adapters without effect prove nothing"
    # Our kernels share the work out; torch's operators do it by themselves, and spin where others want the cores.
    num_threads = 1 if native.load() is None else 2
    config = EngineConfig(model_path=base.path, dtype="float32", num_threads=num_threads, **options)
    # Neighbours of one adapter and those of others, in any order.
    assert run_engine(build_engine(config, adapters), requests[::2] + requests[1::2]) == expected


# Which modules there are is told of all by our kernels.
@pytest.mark.parametrize(
    ("family", "by"),
    [
        *((name, "kernels") for name in ("qwen3-moe", "mixtral", "olmoe", "gpt-oss", "granite-moe", "qwen2-moe")),
        *((name, "operators") for name in ("qwen3-moe", "gpt-oss")),
    ],
    indirect=["by"],
)
def test_they_mix_with_others_and_generate_what_peft_generates(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, by: str, family: str
) -> None:
    path_by_name = save_beyond_products(partial(make_model, family), tmp_path, configs_for(family))
    check(family, checkpoint(family), path_by_name, path_by_name, max_batched_tokens=48)


def one_by_one(family: str, folder: Path, *, leaving_out: Callable[[str], bool]) -> tuple[str, str]:
    """Save an adapter of each expert's modules, all of them there and without some, whose products are 0 there."""
    torch.manual_seed(5)
    letters = LETTERS if family == "mixtral" else {name: name for name in LETTERS}
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    model = make_model(family)
    tensors: dict[str, torch.Tensor] = {}
    for layer, part in enumerate(model.model.layers):
        if not hasattr(part.mlp, "experts"):
            continue
        count, hidden, inner = part.mlp.experts.down_proj.shape
        for expert in range(count):
            for name, called in letters.items():
                at = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{called}"
                sizes = (inner, hidden) if name == "down_proj" else (hidden, inner)
                tensors[f"{at}.lora_A.weight"] = torch.randn(4, sizes[0]) * 0.2
                tensors[f"{at}.lora_B.weight"] = torch.randn(sizes[1], 4) * (0 if leaving_out(at) else 0.3)
    # Not those of a layer that has no experts.
    targets = rf".*\.experts\.(\d+\.)?({'|'.join(letters.values())})"
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": targets}
    paths = []
    for name, kept in (("whole", tensors), ("parts", {k: v for k, v in tensors.items() if not leaving_out(k)})):
        path = folder / name
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(config))
        save_file(kept, str(path / "adapter_model.safetensors"))
        paths.append(str(path))
    return paths[0], paths[1]


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_those_of_each_expert_alone_generate_what_peft_generates(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, by: str, family: str
) -> None:
    """PEFT makes one of them all as it loads them, and wants all; here an expert may lack any of its modules."""
    whole, parts = one_by_one(family, tmp_path, leaving_out=lambda name: ".experts.1." in name or ".2.w1" in name)
    stacked = save_beyond_products(partial(make_model, family), tmp_path, {"all": OF_EXPERTS["all-experts"]})
    check(family, checkpoint(family), {"parts": parts, **stacked}, {"parts": whole, **stacked})


def test_what_peft_saved_before_it_told_in_from_out_is_the_same(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, by: str
) -> None:
    """Files of 0.18 have the transposed product: A [experts * rank, out] and B [in, rank * experts]."""
    options = OF_EXPERTS["all-experts"] | {"target_modules": []}
    saved = save_beyond_products(partial(make_model, "qwen3-moe"), tmp_path, {"new": options})["new"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "adapter_config.json").write_text((Path(saved) / "adapter_config.json").read_text())
    tensors = load_file(f"{saved}/adapter_model.safetensors")
    count = 16
    swapped = {}
    for name in tensors:
        other = tensors[name.replace("lora_A", "lora_X").replace("lora_B", "lora_A").replace("lora_X", "lora_B")]
        if "lora_A" in name:
            by_expert = other.unflatten(1, (-1, count)).permute(2, 1, 0)
            swapped[name] = by_expert.flatten(0, 1).contiguous()
        else:
            by_expert = other.unflatten(0, (count, -1)).permute(2, 1, 0)
            swapped[name] = by_expert.flatten(1, 2).contiguous()
    save_file(swapped, str(old / "adapter_model.safetensors"))
    check("qwen3-moe", checkpoint("qwen3-moe"), {"old": str(old), "new": saved}, {"old": saved, "new": saved})


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_over_rounded_weights_a_request_is_what_it_is_alone(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, family: str
) -> None:
    """Adapters read what experts read before it is rounded; peft has no such base to compare with."""
    path_by_name = save_beyond_products(partial(make_model, family), tmp_path, configs_for(family))
    adapters = [reference(name, path) for name, path in path_by_name.items()]
    prompts = random_prompts(len(adapters) + 1, longest=40)
    digests = [*(adapter.digest for adapter in adapters), None]
    requests = [
        greedy(str(n), prompt, adapter=digest) for n, (prompt, digest) in enumerate(zip(prompts, digests, strict=True))
    ]
    base = checkpoint(family).path
    config = EngineConfig(model_path=base, dtype="float32", num_threads=2, quantization="int8", max_batched_tokens=24)
    together = run_engine(build_engine(config, adapters), requests)
    alone = [run_engine(build_engine(config, adapters[n : n + 1]), [request]) for n, request in enumerate(requests)]
    assert together == {name: tokens for found in alone for name, tokens in found.items()}
    unadapted = run_engine(build_engine(config), [greedy(str(n), prompt) for n, prompt in enumerate(prompts)])
    assert together[str(len(adapters))] == unadapted[str(len(adapters))]
    assert sum(together[name] != unadapted[name] for name in together) > 2


@pytest.mark.parametrize("family", ["qwen2-moe", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_by_the_gpu_s_kernels_their_tokens_are_those_of_the_cpu(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Recorded steps and launched ones, with adapters of experts, others and the base side by side."""
    names = ["all-experts", "router", "patterned-experts"]
    configs = {name: configs_for(family)[name] for name in names}
    path_by_name = save_beyond_products(partial(make_model, family), tmp_path, configs)
    adapters = [reference(name, path_by_name[name]) for name in names]
    digests = [*(adapter.digest for adapter in adapters), None]
    prompts = random_prompts(len(digests), longest=6)
    requests = [greedy(str(n), prompts[n], 3, adapter=digest) for n, digest in enumerate(digests)]
    path = checkpoint(family).path
    expected = run_engine(build_engine(config_of(path, "cpu"), adapters), requests)
    changed = [n for n in range(len(names)) if expected[str(n)] != checkpoint(family).generate(prompts[n], 3)]
    assert len(changed) > 1, "adapters without effect prove nothing"
    # Few sizes are recorded: interpreted, each takes its time.
    config = replace(config_of(path), max_num_seqs=2, max_batched_tokens=8)
    replays = Replays(monkeypatch)
    assert run_engine(build_engine(config, adapters), requests) == expected
    assert replays.are_there
