"""Norms and gated MLPs are recognized by what they compute, and nothing else is taken for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from engine.fallback.plain_parts import GatedMlp, gated_mlp_of, norm_of
from kernels.add_rms_norm.reference import add_rms_norm
from tests.engine.fallback.saved import config_of

WIDTH = 24
EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Scaled = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the quotient in float32 and the weight to the norm."""


class Norm(nn.Module):
    def __init__(self, scaled: Scaled, dtype: torch.dtype, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH).to(dtype), requires_grad=False)
        self.variance_epsilon = EPS
        self.scaled, self.groups = scaled, groups

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float().unflatten(-1, (self.groups, -1))
        quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.scaled(quotient.flatten(-2), self.weight).to(hidden.dtype)


class LargerEps(Norm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        own, self.variance_epsilon = self.variance_epsilon, 2 * self.variance_epsilon
        try:
            return super().forward(hidden)
        finally:
            self.variance_epsilon = own


class GatedNorm(Norm):
    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden) * (1 if gate is None else gate)


FORMS: dict[str, Scaled] = {
    "rounded before it is scaled": lambda quotient, weight: weight * quotient.to(weight.dtype),
    "scaled before it is rounded": lambda quotient, weight: weight.float() * quotient,
    "scaled by one and more": lambda quotient, weight: (1.0 + weight.float()) * quotient,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_norms_of_every_form_are_computed_as_theirs(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    module = Norm(FORMS[form], dtype)
    found = norm_of(module, dtype)
    assert found is not None
    x = torch.randn(50, WIDTH).to(dtype)
    theirs, ours = module(x), add_rms_norm(x, None, found.weight, found.eps)
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype is torch.float32 else 0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_modules_that_compute_something_else_are_no_norms(dtype: torch.dtype) -> None:
    plain = FORMS["rounded before it is scaled"]
    others = [
        Norm(plain, dtype, groups=2),
        Norm(lambda quotient, weight: (2.0 + weight.float()) * quotient, dtype),
        LargerEps(plain, dtype),
        GatedNorm(plain, dtype),
        nn.LayerNorm(WIDTH, bias=False).to(dtype),
        nn.LayerNorm(WIDTH).to(dtype),
        nn.Embedding(WIDTH, 1).to(dtype),
        nn.Linear(WIDTH, 1, bias=False).to(dtype),
        nn.SiLU(),
    ]
    assert [norm_of(module, dtype) for module in others] == [None] * len(others)


class Mlp(nn.Module):
    def __init__(
        self, act_fn: Callable[[torch.Tensor], torch.Tensor], *, factor: float = 1.0, bound: float = 1e9
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)
        self.act_fn, self.factor, self.bound = act_fn, factor, bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=self.bound)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x) * self.factor)


class ScalingMlp(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 0.5)


class JointMlp(nn.Module):
    def __init__(self, *, is_gate_first: bool = True) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 24), nn.Linear(12, 8)
        self.is_gate_first = is_gate_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up if self.is_gate_first else functional.silu(up) * gate)


def test_gated_mlps_are_found_with_their_activation() -> None:
    halves, joint = ("gate_proj", "up_proj"), ("gate_up_proj",)
    assert gated_mlp_of(Mlp(nn.SiLU()), torch.float32) == GatedMlp("silu", halves)
    assert gated_mlp_of(Mlp(nn.GELU(approximate="tanh")), torch.float32) == GatedMlp("gelu", halves)
    assert gated_mlp_of(JointMlp(), torch.float32) == GatedMlp("silu", joint)


def test_modules_that_compute_something_else_are_no_gated_mlps() -> None:
    uneven, inner = Mlp(nn.SiLU()), Mlp(nn.SiLU())
    uneven.up_proj = nn.Linear(8, 12, bias=False)
    inner.down_proj = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 8))  # type: ignore[assignment]
    others = [
        Mlp(nn.ReLU()),
        Mlp(nn.GELU()),
        Mlp(nn.SiLU(), factor=1.5),
        Mlp(nn.SiLU(), bound=10.0),
        Mlp(nn.SiLU(), bound=100.0),
        ScalingMlp(nn.SiLU()),
        JointMlp(is_gate_first=False),
        uneven,
        inner,
        nn.Linear(8, 8),
    ]
    assert [gated_mlp_of(module, torch.float32) for module in others] == [None] * len(others)
    assert gated_mlp_of(Mlp(nn.SiLU()), torch.bfloat16) is None


def test_looking_at_a_module_leaves_it_as_it_was() -> None:
    module = Mlp(nn.SiLU())
    x = torch.randn(3, 8)
    before, names = module(x), list(vars(module))
    assert gated_mlp_of(module, torch.float32) is not None
    assert torch.equal(module(x), before)
    assert list(vars(module)) == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "norms", "mlps"),
    [
        ("SeedOssForCausalLM", 5, 2),
        ("Glm4ForCausalLM", 9, 2),
        ("Qwen3_5ForCausalLM", 5, 2),
        ("CohereForCausalLM", 0, 2),
        ("StableLmForCausalLM", 0, 2),
        ("ApertusForCausalLM", 9, 0),
        ("Starcoder2ForCausalLM", 0, 0),
    ],
)
def test_those_of_transformers(architecture: str, norms: int, mlps: int, dtype: torch.dtype) -> None:
    """An upgrade of transformers that renames their parts makes a model slower, and no test of tokens fails."""
    model = getattr(transformers, architecture)(config_of(architecture)).to(dtype).eval()
    found: Counter[str] = Counter()
    for module in model.modules():
        found.update(norms=norm_of(module, dtype) is not None, mlps=gated_mlp_of(module, dtype) is not None)
    assert found == {"norms": norms, "mlps": mlps}
