"""Benchmarks of MoE experts in the shapes of one layer: bytes moved and operations computed per second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch

from kernels.architecture import has_fp8_products
from kernels.experts.launch import ExpertMatrix, multiply_by_experts, usual_cut
from kernels.experts.reference import choose_experts as choose_by_definition
from kernels.experts.routing import choose_experts, counters
from kernels.gated_activation.launch import activate_and_multiply
from kernels.lora_experts.launch import expert_expand, expert_shrink
from kernels.lora_shrink.launch import whole_rows
from kernels.mxfp4.reference import BYTES_PER_WEIGHT as MXFP4_BYTES
from kernels.mxfp4.reference import Mxfp4Matrix, pack_mxfp4
from kernels.streamed_linear.launch import to_fp8
from kernels.streamed_linear.layout import BLOCK, BYTES_PER_WEIGHT
from kernels.streamed_linear.reference import to_int4
from loadtest.geometries import MXFP4_EXPONENT
from loadtest.gpu.bench import Bench, random_numbers
from loadtest.gpu.kernels import SHORT
from loadtest.gpu.parts import Attempt
from loadtest.gpu.sizes import Mixture

ROWS = (1, 8, 64, 8192)
RANK, ADAPTERS = 16, 8
FEW_ROWS = 64
"""Up to this many rows, the number of bits per weight dominates."""


def benches(
    mixture: Mixture, device: torch.device, *, scale: int = 1, attempt: Attempt = nullcontext
) -> Iterator[Bench]:
    """Yield routing and products for several numbers of rows; `scale` divides them for a trial without a GPU."""
    experts, hidden, inner = mixture.experts, mixture.hidden, mixture.inner
    gate_up, down = (
        random_numbers(experts * width, depth, device=device).to(SHORT)
        for width, depth in ((2 * inner, hidden), (hidden, inner))
    )
    for rows in sorted({max(1, rows // scale) for rows in ROWS}):
        with attempt("inputs"):
            yield from _of_rows(mixture, gate_up, down, rows)
    with attempt("inputs"):
        yield _of_adapters(mixture, device, rows=max(2, FEW_ROWS // scale), adapters=max(1, ADAPTERS // scale))


def _of_rows(mixture: Mixture, gate_up: torch.Tensor, down: torch.Tensor, rows: int) -> Iterator[Bench]:
    device, experts, chosen = down.device, mixture.experts, mixture.chosen
    x, logits = (random_numbers(rows, width, device=device).to(SHORT) for width in (mixture.hidden, experts))
    counts, where = counters(experts, device), f", {rows} rows"
    of_pairs, _ = choose_by_definition(logits, chosen, is_normed=True)
    # Only the chosen experts are read.
    num_weights = len(of_pairs.unique()) * (gate_up.numel() + down.numel()) / experts
    num_flop = 2.0 * rows * chosen * (gate_up.numel() + down.numel()) / experts
    kinds: dict[str, tuple[ExpertMatrix, ExpertMatrix, float]] = {"": (gate_up, down, x.element_size())}
    kinds[" of mxfp4"] = _random_mxfp4(gate_up), _random_mxfp4(down), MXFP4_BYTES
    if rows <= FEW_ROWS and not any(depth % BLOCK for depth in (mixture.hidden, mixture.inner)):
        kinds[" of int4"] = to_int4(gate_up), to_int4(down), BYTES_PER_WEIGHT
    if rows <= FEW_ROWS and has_fp8_products():
        kinds[" of fp8"] = to_fp8(gate_up), to_fp8(down), 1
    for name, (up, low, weight_bytes) in kinds.items():
        yield Bench(
            name=f"mixture{name}{where}",
            run=partial(
                multiply_by_experts, x, logits, up, low, counts, chosen=chosen, is_normed=True, activation="silu"
            ),
            num_bytes=weight_bytes * num_weights + 2 * x.nbytes,
            num_flop=num_flop,
        )
    tile = usual_cut(rows, chosen, experts, x.element_size()).block_m
    yield Bench(
        name=f"choice of experts{where}",
        run=lambda: choose_experts(logits, chosen, counts, is_normed=True, tile=tile),
        num_bytes=logits.nbytes + 3 * of_pairs.nbytes,
    )
    yield _grouped(x, of_pairs, gate_up, down, num_weights * x.element_size() + 2 * x.nbytes, num_flop)


def _of_adapters(mixture: Mixture, device: torch.device, *, rows: int, adapters: int) -> Bench:
    """Return LoRA for gate and up of all experts, with the rows spread over the adapters."""
    experts, hidden, width = mixture.experts, mixture.hidden, 2 * mixture.inner
    matrices = [
        (
            random_numbers(experts, RANK, hidden, device=device).to(SHORT),
            whole_rows(random_numbers(experts * width, RANK, device=device).to(SHORT)).view(experts, width, -1),
        )
        for _ in range(adapters)
    ]
    # Gate and up are one entry; the other two entries of an expert are unused here.
    tables = torch.zeros(adapters, experts, 3, 4, dtype=torch.int64)
    for table, (a, b) in zip(tables, matrices, strict=True):
        places = [(a[expert].data_ptr(), b[expert].data_ptr(), RANK, width) for expert in range(experts)]
        table[:, 0] = torch.tensor(places)
    tables = tables.to(device)
    of_rows = torch.arange(rows, device=device) % adapters
    addresses = tables.data_ptr() + of_rows * tables[0].nbytes
    x, logits = (random_numbers(rows, count, device=device).to(SHORT) for count in (hidden, experts))
    y = random_numbers(rows * mixture.chosen, width, device=device).to(SHORT)
    height = usual_cut(rows, mixture.chosen, experts, x.element_size()).block_m
    routing = choose_experts(logits, mixture.chosen, counters(experts, device), is_normed=True, tile=height)

    def run(kept: object = (matrices, tables)) -> None:
        shrunk = expert_shrink(x, routing, addresses, entry=0, products=2, max_rank=RANK, height=height)
        expert_expand(y, shrunk, routing, addresses, entry=0, height=height)

    num_met = len((of_rows.unsqueeze(1) * experts + routing.experts).unique())
    return Bench(
        name=f"LoRA of gate and up of experts, {rows} rows of {adapters} adapters",
        run=run,
        num_bytes=num_met * RANK * (hidden + width) * x.element_size() + x.nbytes + 2 * y.nbytes,
    )


def _random_mxfp4(numbers: torch.Tensor) -> Mxfp4Matrix:
    """Return random MXFP4 weights of the same shape."""
    out, depth = numbers.shape
    blocks = torch.randint(0, 256, (out, depth // 2), dtype=torch.uint8, device=numbers.device)
    exponents = torch.full((out, depth // 32), MXFP4_EXPONENT, dtype=torch.uint8, device=numbers.device)
    return pack_mxfp4(blocks, exponents, numbers.dtype)


def _grouped(
    x: torch.Tensor,
    of_pairs: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_bytes: float,
    num_flop: float,
) -> Bench:
    """Return torch's grouped products of rows already sorted by expert; results are not summed over experts."""
    order = of_pairs.flatten().argsort(stable=True)
    experts = len(down) // x.shape[1]
    ends = of_pairs.flatten().bincount(minlength=experts).cumsum(0).to(torch.int32)
    inputs = x[order // of_pairs.shape[1]]
    ups, downs = (weight.view(experts, -1, weight.shape[1]).mT for weight in (gate_up, down))

    def run() -> torch.Tensor:
        inner = activate_and_multiply(torch._grouped_mm(inputs, ups, offs=ends), "silu")
        return torch._grouped_mm(inner, downs, offs=ends)

    return Bench(name=f"torch's grouped products, {len(x)} rows", run=run, num_bytes=num_bytes, num_flop=num_flop)
