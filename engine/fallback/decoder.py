"""Runs a transformers model over the paged KV cache. The engine computes attention, linear products and adapters.

The model sees a step's tokens as one long sequence with positions; only attention and recurrent layers separate
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from engine.attention import AttentionBatch
from engine.backend import Backend
from engine.decoder.decoder import DecoderBatch, StepOutput
from engine.decoder.rope import NO_ROPE
from engine.decoder.rope_table import rope_table
from engine.fallback.module_layout import ModuleLayout
from engine.fallback.rebinding import rebound
from engine.fallback.rotations import LaterRotations
from engine.fallback.spec import StateKind
from engine.fallback.state_functions import KIND_BY_FUNCTION, state_functions
from engine.fallback.states import NOTHING_KEPT, RowStates, cache_name
from engine.kv_cache import KvCache
from engine.lora import LinearProducts, PartedLora
from engine.step import Snapshot, StateMoves
from kernels.state_rows import StateRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.fallback.spec import FallbackSpec


@dataclass(frozen=True, slots=True)
class _Step:
    attention: tuple[AttentionBatch, ...]
    cache: KvCache
    lora: PartedLora | None
    singles: StateRows | None  # rows whose states the device finds; None if the host does
    rows: Sequence[Sequence[int]]  # as `AttentionBatch.rows`; empty if the host finds no states
    kept: Mapping[int, Sequence[Snapshot]]  # snapshots to take on the way, by row
    lora_by_tokens: dict[tuple[int, int], LinearProducts | None] = field(default_factory=dict)
    still_by_dim: dict[int, torch.Tensor] = field(default_factory=dict)  # as `FallbackDecoder._still_of` returns them


class _StatePart(NamedTuple):
    """A recurrent module: the index of its layer, its cache argument, `forward` as it is called and as it was.

    `direct` are the kinds of its states that it only passes on to our kernels.
    """

    layer: int
    cache: str
    forward: Callable[..., torch.Tensor]
    theirs: Callable[..., torch.Tensor]
    direct: Collection[StateKind]


class FallbackDecoder:
    """An `engine.runner.StepModel`. Takes over a model; the caller sets its attention to `attend`.

    Args:
        model: in host memory. Its modules move to the device one by one, so that of quantized weights no more than one
            is there at a time as it was loaded.
        states: recurrent states of its layers for each row.
        backend: computes attention and adapters, and lays out linear weights and the vocabulary anew.
        dtype: of keys and values, before a quantized cache quantizes them.
        stays_on_device: in steps of one token per row, the host does not look at the batch, so they can be recorded.
    """

    def __init__(
        self,
        spec: FallbackSpec,
        model: PreTrainedModel,
        states: RowStates,
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stays_on_device: bool = False,
    ) -> None:
        self.spec = spec
        self._stays_on_device = stays_on_device
        self._backend = backend
        self._dtype = dtype
        self._model, self._states = model, states
        self._step: _Step | None = None
        self._modules = ModuleLayout(spec, backend, dtype)
        self._last_hidden: torch.Tensor | None = None
        self._rotations = LaterRotations()
        dims = {shape.dim for shape in spec.kv_shapes()}
        self._still = {dim: rope_table(NO_ROPE, dim, 1, dtype).to(device) for dim in dims}
        self._take_states()
        decoder = model.get_decoder()
        # For some models get_decoder() returns the output matrix.
        decoder = model.base_model if decoder is model.get_output_embeddings() else decoder
        decoder.register_forward_hook(self._keep_hidden)
        for name in spec.rotating_modules:
            self._rotations.put_off(model.get_submodule(name))
        self._modules.take_over(model, device)

    def _take_states(self) -> None:
        """Make the recurrent modules keep their states here."""
        kernels = self._backend.state_kernels()
        functions = {} if kernels is None else state_functions(kernels)
        for name in self.spec.state_modules:
            module = self._model.get_submodule(name)
            forward, replaced = rebound(module, functions)
            direct = {KIND_BY_FUNCTION[name] for name in replaced if name in KIND_BY_FUNCTION}
            cache = cache_name(module)
            assert cache is not None, "it has kept states in one"
            part = _StatePart(module.layer_idx, cache, forward, module.forward, direct)
            module.forward = partial(self._by_states, part)

    def make_room(self, num_snapshots: int) -> None:
        """Allocate `num_snapshots` snapshots of states; steps take none before."""
        self._states.make_room(num_snapshots)

    @torch.inference_mode()
    def forward(self, batch: DecoderBatch, cache: KvCache) -> StepOutput:
        """Compute a step and write its keys and values to the cache."""
        moves = batch.state_moves
        if moves is not None:
            self.begin(moves)
        has_states, rows = bool(self.spec.states), batch.attention[0].rows
        lora = self._backend.lora(batch.adapters, batch.sample_adapters)
        if lora is not None:
            assert isinstance(lora, PartedLora), "only such are made for models without recorded programs"
            lora.begin(len(batch.token_ids))
        are_single = has_states and self._are_single(batch)
        self._step = _Step(
            batch.attention,
            cache,
            lora,
            self._states.singles(rows) if are_single else None,
            (rows if batch.host_rows is None else batch.host_rows).tolist() if has_states and not are_single else (),
            NOTHING_KEPT if moves is None else moves.kept,
        )
        self._modules.begin(lora, rows[: batch.attention[0].num_decodes])
        self._rotations.begin()
        try:
            output = self._model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.sampled,
            )
        finally:
            self._step = None
            self._modules.end()
            self._rotations.end()
        logits = output.logits[0]
        if len(logits) != len(batch.sampled):
            logits = logits[batch.sampled]
        assert self._last_hidden is not None, "the model has passed by its own layers"
        hidden = [self._last_hidden[start:end] for start, end in batch.pooled]
        self._last_hidden = None
        if moves is not None and are_single:
            self.end(moves)
        return StepOutput(logits.float(), hidden)

    def begin(self, moves: StateMoves) -> None:
        """Restore states, before a step."""
        self._states.begin(moves)

    def end(self, moves: StateMoves) -> None:
        """Take snapshots, after a step of one token per row; longer rows take them on the way."""
        self._states.keep(moves.kept)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend, by transformers' interface: [1, heads, tokens, head_dim] to [1, tokens, heads, value_dim]."""
        step = self._step
        assert step is not None, "attention is asked for outside of a step"
        place = self.spec.places[module.layer_idx]  # type: ignore[index]  # the module's own, and not a tensor
        cache, form, dim = step.cache.layer(place), self.spec.layers[place], key.shape[-1]
        padded = value if value.shape[-1] == dim else functional.pad(value, (0, dim - value.shape[-1]))
        # A layer with the keys of another one writes them again, to the same slots.
        qkv = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (query, key, padded)], dim=1).to(self._dtype)
        angles = self._rotations.table(query, key)
        cos_sin = self._still_of(step, dim, len(qkv)) if angles is None else angles
        out = self._backend.attend(qkv, cos_sin, None, 0.0, cache, step.attention[cache.table], form)
        return out[..., : value.shape[-1]].unsqueeze(0).to(query.dtype), None

    def _by_states(self, part: _StatePart, *arguments: torch.Tensor, **told: Any) -> torch.Tensor:
        """Call a recurrent module on the tokens of each row; outside of a step, call its original `forward`."""
        if self._step is None:
            return part.theirs(*arguments, **told)
        (x,) = arguments or (told["hidden_states"],)

        def module(some: torch.Tensor, held: object) -> torch.Tensor:
            return part.forward(some, **{part.cache: held})

        def module_of_tokens(some: torch.Tensor, held: object, *, start: int, end: int) -> torch.Tensor:
            whole, self._modules.lora = self._modules.lora, self._lora_of(start, end)
            try:
                return module(some, held)
            finally:
                self._modules.lora = whole

        if self._step.singles is not None:
            return self._states.call_singles(module, part.layer, x, self._step.singles, part.direct)
        return self._states.call(module_of_tokens, part.layer, x, self._step.rows, self._step.kept)

    def _lora_of(self, start: int, end: int) -> LinearProducts | None:
        """Return the products of some of the step's tokens, made once a step."""
        step = self._step
        if step is None or step.lora is None:
            return None
        if (start, end) not in step.lora_by_tokens:
            step.lora_by_tokens[start, end] = step.lora.of_tokens(start, end)
        return step.lora_by_tokens[start, end]

    def _still_of(self, step: _Step, dim: int, num_tokens: int) -> torch.Tensor:
        """Return cosines and sines of angle 0, [tokens, 2, dim], made once a step if a layer asks for them."""
        if dim not in step.still_by_dim:
            step.still_by_dim[dim] = self._still[dim].repeat(num_tokens, 1, 1)
        return step.still_by_dim[dim]

    def _are_single(self, batch: DecoderBatch) -> bool:
        return self._stays_on_device and batch.attention[0].num_decodes == len(batch.token_ids)

    def _keep_hidden(self, _module: torch.nn.Module, _arguments: object, output: Any) -> None:
        self._last_hidden = output[0][0]
