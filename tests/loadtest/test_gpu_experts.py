"""What is measured of mixtures of experts, on a simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.decoder.reading import read_spec
from engine.loading.mxfp4 import Mxfp4Weight
from loadtest.geometries import CONFIG_BY_NAME, WEIGHT_STD
from loadtest.gpu import __main__ as command
from loadtest.gpu import engine, experts
from loadtest.gpu.parts import Notes
from loadtest.gpu.sizes import Mixture
from loadtest.gpu.timing import Ceilings
from tests.loadtest.test_geometries import SMALL

HERE = torch.device("cuda")
MIXTURE = Mixture(name="tiny", hidden=128, inner=128, experts=4, chosen=2)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tries what is measured on a GPU"),
    pytest.mark.usefixtures("a_gpu"),
]


class Timer:
    """Runs what it is given once."""

    def seconds(self, run: Callable[[], object]) -> float:
        run()
        return 0.5


def test_the_mixture_and_what_it_stands_beside_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (
        ("DEVICE", HERE),
        ("QWEN_3_MOE", MIXTURE),
        ("GpuTimer", Timer),
        ("measure_ceilings", lambda: Ceilings(bytes_per_s=4e12, flop_per_s=8e14)),
        ("compile_ahead", lambda runs, num_processes: None),
    ):
        monkeypatch.setattr(command, name, value)
    monkeypatch.setattr(experts, "ROWS", (1, 5))
    [part] = [part for part in command.parts() if part.name == "experts"]
    part.run(Notes(tmp_path / "notes"))
    told = json.loads((tmp_path / "notes").read_text())
    kinds = ["mixture", "mixture of mxfp4", "mixture of int4", "choice of experts", "torch's grouped products"]
    names = [f"{kind}, {rows} rows" for rows in (1, 5) for kind in kinds]
    names.append("LoRA of gate and up of experts, 64 rows of 8 adapters")
    assert [figure["name"] for figure in told["figures"]] == names
    # Of one row's experts 2 of 4, of two bytes a number, what is read and what is written.
    assert told["figures"][0]["gb_per_s"] == pytest.approx((2 * 3 * 128 * 128 * 2 + 2 * 128 * 2) / 0.5 / 1e9)


def test_a_step_reads_the_experts_of_gpt_oss_in_four_bits(tmp_path: Path) -> None:
    """Of 19.1 billion weights in MXFP4 one row meets an eighth; 0.6 more are attention's, and as many the output's."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["gpt-oss-20b"]))
    spec = read_spec(str(tmp_path))
    work = engine.Work(model="gpt-oss-20b", batch=1, context=0, answer_tokens=0)
    assert engine.step_bytes(spec, work, 2) == pytest.approx(0.532 * 19.11e9 / 8 + 2 * (0.637e9 + 0.579e9), rel=0.01)


def test_weights_of_gpt_oss_are_drawn_in_four_bits(tmp_path: Path) -> None:
    small = SMALL | {"intermediate_size": 64, "num_local_experts": 4, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["gpt-oss-20b"] | small))
    spec = read_spec(str(tmp_path))
    drawn = dict(engine.random_weights(str(tmp_path), spec, torch.bfloat16, torch.device("cpu")))
    experts = [drawn[f"layers.0.experts.{name}"] for name in ("gate_up", "down")]
    assert [tuple(weight.shape) for weight in experts] == [(4 * 128, 32), (4 * 32, 64)]
    for weight in experts:
        assert isinstance(weight, Mxfp4Weight)
        assert weight.dense().float().std() == pytest.approx(WEIGHT_STD, rel=0.15)


def test_a_step_s_floor_counts_the_experts_that_its_rows_meet(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["qwen3-30b-a3b"]))
    spec = read_spec(str(tmp_path))
    one, many = (engine.Work(model="qwen3-30b-a3b", batch=batch, context=0, answer_tokens=0) for batch in (1, 64))
    # 3.3 billion weights are active, less the embedding; of 64 rows each expert has some but for one in sixty.
    assert engine.step_bytes(spec, one, 2) == pytest.approx(2 * (3.35e9 - 0.31e9), rel=0.02)
    assert engine.step_bytes(spec, many, 2) == pytest.approx(2 * (30.5e9 - 0.31e9) * 0.985, rel=0.01)
