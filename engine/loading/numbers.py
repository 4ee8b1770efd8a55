"""Reads quantized weights that are dequantized on load; `engine.decoder.stored_numbers` has the layouts.

    int8            W[o, i] = scale[o] / unit * w8[o, i]
    bitsandbytes    W[n] = absmax[n // 64] * map[level[n]],        n = in * o + i
                    absmax[b] = nested_absmax[b // 256] * nested_map[absmax8[b]] + offset, if the scales are 8-bit
    nvfp4           W[o, i] = whole * scale[o, i // 16] * E2M1[level[o, i]]

All arithmetic is in float32, rounded once. Sources: Dettmers et al., 2023 (QLoRA, arXiv 2305.14314, section 3);
Dettmers et al., 2022 (LLM.int8(), arXiv 2208.07339); names and shapes as in checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from engine.decoder.stored_numbers import BLOCK, NESTED_BLOCK, NVFP4_GROUP, StoredBnb4, StoredInt8, StoredNvfp4
from engine.errors import CheckpointError
from kernels.packed_linear_int4.reference import E2M1

Read = Callable[[str], torch.Tensor]
"""Returns a tensor of a checkpoint by its name."""


def read_int8(read: Read, module: str, stored: StoredInt8, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantized weight [out, in] of one linear module; `read` returns its tensors by name."""
    scales = read(f"{module}.{stored.scale}").float().view(-1, 1) / stored.unit
    return (read(f"{module}.weight").float() * scales).to(dtype)


def read_bnb4(read: Read, module: str, stored: StoredBnb4, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantized weight [out, in] of one linear module.

    Raises:
        CheckpointError: the stored settings are unreadable or do not match the weight.
    """
    pairs, scales = read(f"{module}.weight").flatten(), read(f"{module}.weight.absmax")
    shape, offset = _state(read(f"{module}.{stored.state}"), f"{module}.{stored.state}", stored, 2 * len(pairs))
    if stored.is_nested:
        shared = read(f"{module}.weight.nested_absmax").repeat_interleave(NESTED_BLOCK)[: len(scales)]
        scales = read(f"{module}.weight.nested_quant_map")[scales.int()] * shared + offset
    numbers = _look_up(read(f"{module}.weight.quant_map"), pairs, is_first_higher=True)[: shape[0] * shape[1]]
    whole = len(numbers) // BLOCK
    numbers[: whole * BLOCK].view(whole, BLOCK).mul_(scales[:whole].unsqueeze(1))
    numbers[whole * BLOCK :].mul_(scales[-1])
    return numbers.view(shape).to(dtype)


def read_nvfp4(read: Read, module: str, stored: StoredNvfp4, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantized weight [out, in] of one linear module."""
    pairs = read(f"{module}.{stored.held}")
    whole = read(f"{module}.{stored.whole_scale}").float().view(())
    scales = read(f"{module}.weight_scale").float() * (1 / whole if stored.divides else whole)
    numbers = _look_up(torch.tensor(E2M1, device=pairs.device), pairs, is_first_higher=False)
    return numbers.view(*scales.shape, NVFP4_GROUP).mul_(scales.unsqueeze(-1)).flatten(1).to(dtype)


def _look_up(numbers: torch.Tensor, pairs: torch.Tensor, *, is_first_higher: bool) -> torch.Tensor:
    """Return the values of 4-bit codes, flat; each byte holds two codes, and `numbers` has the value of each code."""
    byte = torch.arange(256, device=pairs.device)
    first, second = (byte >> 4, byte & 15) if is_first_higher else (byte & 15, byte >> 4)
    of_byte = torch.stack((numbers[first], numbers[second]), dim=1)
    return of_byte.index_select(0, pairs.flatten().int()).flatten()


def _state(state: torch.Tensor, name: str, stored: StoredBnb4, count: int) -> tuple[tuple[int, int], float]:
    """Return the weight's shape, of `count` or `count - 1` elements, and the offset of its nested scales."""
    sizes = {"blocksize": BLOCK, **({"nested_blocksize": NESTED_BLOCK} if stored.is_nested else {})}
    try:
        told = json.loads(bytes(state.tolist()))
        out, depth = map(int, told["shape"])
        offset = float(told["nested_offset"]) if stored.is_nested else 0.0
        is_known = {name: told[name] for name in sizes} == sizes and out * depth in (count, count - 1)
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{name} is not what bitsandbytes writes.") from None
    if not is_known:
        raise CheckpointError(f"{name} is {json.dumps(told)[:300]}; {count} numbers in blocks of {sizes} are there.")
    return (out, depth), offset
