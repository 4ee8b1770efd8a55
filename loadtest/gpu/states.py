"""Benchmarks of kernels of layers that keep states, in the shapes of one layer, beside functions of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch

from kernels.causal_conv.launch import causal_conv
from kernels.gated_delta.launch import gated_delta
from kernels.selective_scan.launch import selective_scan
from kernels.state_rows import StateRows
from loadtest.gpu.bench import Bench, random_numbers
from loadtest.gpu.parts import Attempt
from loadtest.gpu.state_launches import WIDTH, DeltaLayer, ScanLayer

TOKENS, THEIR_CHUNK = 8192, 256


def benches(
    delta: DeltaLayer, scan: ScanLayer, device: torch.device, *, scale: int = 1, attempt: Attempt = nullcontext
) -> Iterator[Bench]:
    """Yield steps of several numbers of rows, and a prompt; `scale` divides them for a trial without a GPU."""
    for rows, tokens in ((1, 1), (max(2, 64 // scale), 1), (1, TOKENS // scale)):
        with attempt("inputs"):
            yield from _of_delta(delta, device, rows, tokens)
        with attempt("inputs"):
            yield from _of_scan(scan, device, rows, tokens)


def _of_delta(layer: DeltaLayer, device: torch.device, rows: int, tokens: int) -> Iterator[Bench]:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    key_heads, heads, key_dim, value_dim = layer
    widths = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    x, weight = (random_numbers(*shape, device=device) for shape in ((rows, tokens, sum(widths)), (sum(widths), WIDTH)))
    parts = x.split(widths, dim=-1)
    q, k, v = (
        part.unflatten(-1, (count, -1)) for part, count in zip(parts, (key_heads, key_heads, heads), strict=True)
    )
    g, beta = -torch.rand(rows, tokens, heads, device=device), torch.rand(rows, tokens, heads, device=device)
    states = torch.zeros(rows, heads, key_dim, value_dim, device=device)
    inputs = x.new_zeros(rows, sum(widths), WIDTH)
    are_steps = tokens == 1
    held, where = _held(rows, device), _where(rows, tokens)
    num_bytes = 2 * states.nbytes + x.nbytes + v.nbytes + g.nbytes + beta.nbytes
    # Of the rule as it is written: three products of a state and a vector for each token.
    num_flop = 6.0 * rows * tokens * heads * key_dim * value_dim
    rule = partial(gated_delta, q, k, v, g, beta, states, held if are_steps else None)
    yield Bench(name=f"gated delta rule{where}", run=rule, num_bytes=num_bytes, num_flop=num_flop)
    their_rule = theirs.torch_recurrent_gated_delta_rule if are_steps else theirs.torch_chunk_gated_delta_rule
    options = {"initial_state": states, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    yield Bench(
        name=f"transformers' gated delta rule{where}",
        run=partial(their_rule, q, k, v, g=g, beta=beta, **options),
        num_bytes=num_bytes,
        num_flop=num_flop,
    )
    num_bytes = 2 * x.nbytes + weight.nbytes + (2 * inputs.nbytes if are_steps else 0)
    conv = partial(causal_conv, x, inputs if are_steps else None, weight, None, held if are_steps else None)
    yield Bench(name=f"causal convolution{where}", run=conv, num_bytes=num_bytes)
    if are_steps:
        their_conv = partial(theirs.causal_conv1d_update, x.transpose(1, 2), inputs, weight, None, "silu")
    else:
        their_conv = partial(theirs.causal_conv1d_fn, x.transpose(1, 2), weight, None, activation="silu")
    yield Bench(name=f"transformers' causal convolution{where}", run=their_conv, num_bytes=num_bytes)


def _of_scan(layer: ScanLayer, device: torch.device, rows: int, tokens: int) -> Iterator[Bench]:
    from transformers.models.mamba2 import modeling_mamba2 as theirs

    heads, groups, head_dim, state_dim = layer
    widths = [heads * head_dim, groups * state_dim, groups * state_dim]
    parts = random_numbers(rows, tokens, sum(widths), device=device).split(widths, dim=-1)
    x, b, c = (part.unflatten(-1, (count, -1)) for part, count in zip(parts, (heads, groups, groups), strict=True))
    dt, a, d = (torch.rand(*shape, device=device) for shape in ((rows, tokens, heads), (heads,), (heads,)))
    states = torch.zeros(rows, heads, head_dim, state_dim, device=device)
    are_steps = tokens == 1
    told = {
        "num_bytes": 2.0 * states.nbytes + 2 * x.nbytes + b.nbytes + c.nbytes + dt.nbytes,
        # Of the scan as it is written: two products of a state and a vector for each token.
        "num_flop": 4.0 * rows * tokens * heads * head_dim * state_dim,
    }
    run = partial(selective_scan, x, dt, -a, b, c, d, states, _held(rows, device) if are_steps else None)
    yield Bench(name=f"selective scan{_where(rows, tokens)}", run=run, **told)
    if are_steps:
        by_output = [part.expand(*part.shape[:-1], head_dim) for part in (dt.transpose(1, 2), d[:, None])]
        wide = -a[:, None, None].expand(-1, head_dim, state_dim)
        their_scan = partial(
            theirs.mamba2_selective_state_update, states, x[:, 0], by_output[0], wide, b[:, 0], c[:, 0], by_output[1]
        )
    else:
        options = {"initial_states": states, "return_final_states": True}
        their_scan = partial(theirs.mamba2_chunk_scan, x, dt, -a, b, c, THEIR_CHUNK, D=d, **options)
    yield Bench(name=f"transformers' selective scan{_where(rows, tokens)}", run=their_scan, **told)


def _held(rows: int, device: torch.device) -> StateRows:
    return StateRows(torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.bool, device=device))


def _where(rows: int, tokens: int) -> str:
    return f", {rows} rows" if tokens == 1 else f", {tokens} tokens"
