"""What stands for requests in steps tried at start: random keys and values, and an adapter. The same in every start."""

from __future__ import annotations

from math import sqrt

import torch

from adapters.tensor_names import parse_module_name
from engine.adapter_tables import entries_of, entry_of
from engine.decoder.model_spec import ModelSpec
from engine.kv_cache import KvCache
from kernels.lora_shrink.launch import whole_rows
from kernels.row_quantization.reference import quantize_rows

SPREAD = 4.0
"""Bound on keys and values. If they were small, all keys would weigh the same, and a lost one would hardly matter."""
MAX_RANK = 32
"""Takes the kernels two rounds. Numbers for the highest rank that may be configured would take seconds to make."""


def fill_randomly(cache: KvCache, num_layers: int) -> None:
    """Write keys and values to all blocks but the null block, the same in all layers of a shape."""
    layers = [cache.layer(index) for index in range(num_layers)]
    most = max((layer.k[: cache.null_block].numel() for layer in layers), default=0)
    numbers = torch.rand(most + 1, generator=torch.Generator().manual_seed(0)).mul_(2 * SPREAD).sub_(SPREAD)
    numbers = numbers.to(cache.data.device)
    for layer in layers:
        for at, part in enumerate((layer.k, layer.v)):
            held = part[: cache.null_block]
            some = numbers[at : at + held.numel()].view(held.shape)
            if layer.spans is None:
                held.copy_(some)
                continue
            quantized, spans = quantize_rows(some, held.dtype)
            held.copy_(quantized)
            layer.spans[at][: cache.null_block].copy_(spans)


class StandInAdapter:
    """An adapter of all linear modules, which share one A and one B: it takes little memory and time.

    Its products are about as large as those of the base.

    Attributes:
        table: as that of a `TabledAdapter`; valid as long as this object lives.
    """

    def __init__(self, spec: ModelSpec, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        rank, shapes, entries = min(max_rank, MAX_RANK), spec.adapted_shapes(), entries_of(spec)
        deepest, widest = (max((shape[at] for shape in shapes.values()), default=1) for at in range(2))
        generator = torch.Generator().manual_seed(0)
        # A module reads as much of each as its own matrices would have.
        a = torch.randn(rank, deepest, generator=generator) / sqrt(spec.hidden_size)
        b = torch.randn(widest, rank, generator=generator) / sqrt(rank)
        self._a, self._b = a.to(dtype).to(device), whole_rows(b.to(dtype)).to(device)
        entry = [self._a.data_ptr(), self._b.data_ptr(), rank, 0]
        table = torch.zeros((spec.num_model_layers() + 1) * len(entries), len(entry), dtype=torch.int64)
        for module in map(parse_module_name, shapes):
            if module is not None:
                table[entry_of(*module, entries)] = torch.tensor(entry)
        self.table = table.to(device)
