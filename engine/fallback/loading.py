"""Loads a checkpoint with transformers, replaces its attention with the engine's, and compares the two once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import count, pairwise
from pathlib import Path
from weakref import WeakMethod

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging

from engine.attention import AttentionBatch
from engine.backend import Backend
from engine.cache.layout import CacheLayout
from engine.decoder.decoder import DecoderBatch
from engine.errors import CheckpointError
from engine.fallback.decoder import FallbackDecoder
from engine.fallback.probe import keep_angles, quietly
from engine.fallback.reading import classes_of, read_stored_layout
from engine.fallback.spec import FallbackSpec
from engine.fallback.states import RowStates
from engine.fallback.weights import read_tensors
from engine.kv_cache import KvCache
from engine.loading.weight_files import check_weight_files

TRIED_TOKENS = 24
TRIED_BLOCK_TOKENS = 16
MAX_ERROR = 0.1
"""Relative error of logits (Euclidean norm): far above most models' rounding, far below the effect of a wrong mask."""
MAX_ROUNDINGS = 1.0
"""How far the engine may be off, in multiples of the effect of rounding the embeddings differently."""
DRAFTING = re.compile(r"(?P<layer>(?:.+\.)?layers\.(?P<number>\d+)\.)eh_proj\.weight")
"""The tensor that tells a drafting layer: it joins a token's embedding and the hidden state before it."""
CONSTANT = ".attn.masked_bias"
"""What old exports of GPT-2 hide later tokens with, beside the weights."""

_numbers = count()


def load_fallback(
    path: str,
    spec: FallbackSpec,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    num_rows: int,
    *,
    stays_on_device: bool = False,
) -> FallbackDecoder:
    """Load a checkpoint for at most `num_rows` concurrent requests; `stays_on_device` as in `FallbackDecoder`.

    Raises:
        CheckpointError: files or tensors are missing, broken or left over, a trial fails, or the engine's attention
            alters logits.
    """
    model, states = _load(path, spec.architecture, dtype), RowStates(spec.states, num_rows, dtype, device)
    decoder = FallbackDecoder(spec, model, states, backend, dtype, device, stays_on_device=stays_on_device)
    # A unique name, since it selects this decoder and its cache. It outlives the model, hence the weak reference.
    name = f"antiphon_{next(_numbers)}"
    attend = WeakMethod(decoder.attend)
    AttentionInterface.register(name, lambda *parts, **told: attend()(*parts, **told))  # type: ignore[misc]
    try:
        expected = _logits(model, device)
        model.set_attn_implementation(name)
        error = _error(decoder, expected, device, dtype)
        # Some models amplify rounding by more than that, mixtures of experts for instance, whose choice may tip over.
        is_same = error < MAX_ERROR or error < MAX_ROUNDINGS * _rounding(model, expected, device, name)
    except torch.OutOfMemoryError:
        raise  # The memory's fault, not the checkpoint's.
    except Exception as failure:
        raise CheckpointError(f"{path}: {spec.architecture} is not served: a trial run failed: {failure}") from failure
    if not is_same:
        raise CheckpointError(
            f"{path}: {spec.architecture} is not served: with the engine's attention and a prompt in chunks, its "
            f"logits differ by {error:.0%} from those of transformers."
        )
    return decoder


def _load(path: str, architecture: str, dtype: torch.dtype) -> PreTrainedModel:
    check_weight_files(Path(path))
    model_class, config, is_part = classes_of(path, architecture)
    stored, numbers = read_stored_layout(Path(path)), None
    if stored is not None or is_part:
        # Otherwise transformers would load quantized weights with a quantization package, and multiply with it.
        config.__dict__.pop("quantization_config", None)
        numbers = read_tensors(path, stored, dtype, is_part=is_part)
    logging.disable_progress_bar()
    try:
        model, told = model_class.from_pretrained(
            path if numbers is None else None,
            config=config,
            state_dict=numbers,
            dtype=dtype,
            attn_implementation="eager",
            # Grouped matmuls of experts are not available on every device and for every dtype.
            experts_implementation="eager",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # to be told which
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise CheckpointError(f"{path}: transformers cannot load it: {error}") from error
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = [str(name) for name in told.get(what) or ()]
        drafting = _drafting_layers(names, config.num_hidden_layers)
        if found := sorted(name for name in names if not _is_idle(name, numbers or {}, drafting)):
            raise CheckpointError(f"{path}: {what.replace('_', ' ')}: {found[0]} ({len(found)} in all)")
    keep_angles(model)
    return model.eval()


def _drafting_layers(left_over: Iterable[str], depth: int) -> tuple[str, ...]:
    """Return the prefixes of layers after the last of `depth` that predict a token more (MTP); none of ours drafts.

    transformers passes them over by the number that they have in the published model, which may be pruned.
    """
    matches = filter(None, map(DRAFTING.fullmatch, left_over))
    return tuple(match["layer"] for match in matches if int(match["number"]) >= depth)


def _is_idle(name: str, numbers: Mapping[str, torch.Tensor], drafting: tuple[str, ...]) -> bool:
    """Tell whether a leftover tensor has no effect, such as an all-zero bias, which tools add to quantized modules."""
    is_zero = name.endswith(".bias") and name in numbers and not numbers[name].any()
    return is_zero or name.endswith(CONSTANT) or name.startswith(drafting)


def _tokens(vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, TRIED_TOKENS + 1, device=device) * 7919 % vocab_size


@torch.inference_mode()
def _logits(model: PreTrainedModel, device: torch.device) -> torch.Tensor:
    """Return the logits of the last trial token, with transformers' own attention."""
    tokens = _tokens(model.config.vocab_size, device).unsqueeze(0)
    with quietly():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0, -1]
    return logits.float()


def _rounding(model: PreTrainedModel, expected: torch.Tensor, device: torch.device, name: str) -> float:
    """Return how far logits are off from `expected` if each embedding is off by a random part of its last digit."""

    def disturb(_module: torch.nn.Module, _arguments: object, x: torch.Tensor) -> torch.Tensor:
        parts = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device) * 2 - 1
        return (x * (1 + parts * torch.finfo(x.dtype).eps)).to(x.dtype)

    model.set_attn_implementation("eager")
    hook = model.get_input_embeddings().register_forward_hook(disturb)
    try:
        return _distance(_logits(model, device), expected)
    finally:
        hook.remove()
        model.set_attn_implementation(name)


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


def _error(decoder: FallbackDecoder, expected: torch.Tensor, device: torch.device, dtype: torch.dtype) -> float:
    """Recompute the logits with the engine's attention, in two prefill chunks and one decode, and compare."""
    num_blocks = -(-TRIED_TOKENS // TRIED_BLOCK_TOKENS)
    cache = KvCache(
        layout=CacheLayout.single(decoder.spec.num_layers),
        num_blocks=num_blocks,
        block_tokens=TRIED_BLOCK_TOKENS,
        kv_shapes=decoder.spec.kv_shapes(),
        dtype=dtype,
        device=device,
    )
    tokens, logits = _tokens(decoder.spec.vocab_size, device), expected
    for start, end in pairwise((0, TRIED_TOKENS // 2, TRIED_TOKENS - 1, TRIED_TOKENS)):
        positions = torch.arange(start, end, device=device)
        batch = DecoderBatch(
            token_ids=tokens[start:end],
            positions=positions,
            sampled=torch.tensor([end - start - 1], device=device),
            attention=(
                AttentionBatch(
                    slots=positions,
                    rows=torch.tensor([[0, start, end - start, 0]], device=device),
                    tables=torch.arange(num_blocks, device=device).unsqueeze(0),
                    block_tokens=TRIED_BLOCK_TOKENS,
                    null_block=num_blocks,
                    num_decodes=int(end - start == 1),
                ),
            ),
        )
        logits = decoder.forward(batch, cache).logits[0]
    return _distance(logits, expected)
