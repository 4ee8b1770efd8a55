"""Load an adapter from its folder into host memory: read, verify the digest, fit to the base, lay out, check.

Adapters trained by one recipe differ only in tensor data. What follows from configuration and header is therefore
computed once per recipe, and each further adapter only costs reading its data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch.nn.functional import one_hot

from adapters.errors import AdapterError, NoBaseTensorError
from adapters.experts import Stack, expert_module
from adapters.folder import read_config_bytes
from adapters.identity import AdapterRef, DigestStream
from adapters.module_forms import fitted, stored_parts
from adapters.peft_format import LoraConfig, parse_config
from adapters.tensor_file import TensorEntry, TensorFile, parse_header, read_with
from adapters.tensor_names import EMBEDDING, HEAD, WHOLE_MODEL
from adapters.validate import AdaptedModule, ModuleShapes, validate
from adapters.weights import AdapterWeights, Columns, Extras, RawAdapter, RawProjection, split_modules

_TORCH_DTYPE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROWS_AT_ONCE = 1024
"""Rows of a weight and its low-rank update that are materialized at once to compute norms."""

BaseTensors = Callable[[str], torch.Tensor]
"""Returns a tensor of the base by its checkpoint name, with the values that the engine computes with.

Raises `NoBaseTensorError` if there is none of this name."""

LayOut = Callable[[RawAdapter], AdapterWeights]
"""Converts an adapter to the layout that the device multiplies with."""

MAX_RECIPES = 32
MAX_RECIPE_BYTES = 1 << 20
"""Bound on configuration plus header; larger recipes are not cached."""


class _Recipe:
    """What adapters with the same configuration and header share; validated against the base."""

    def __init__(
        self,
        config_bytes: bytes,
        header: bytes,
        data_bytes: int,
        *,
        shapes: ModuleShapes,
        max_rank: int,
        is_tied: bool,
    ) -> None:
        config = parse_config("", config_bytes)
        self.entry_by_name = parse_header("", header, data_bytes)
        self.layouts = validate("", config, self.entry_by_name, shapes, max_rank)
        self._share_rows(config, is_tied=is_tied)
        self.shapes = fitted(shapes, (layout.module for layout in self.layouts.values()))
        self.digest = DigestStream(config, self.entry_by_name)

    def _share_rows(self, config: LoraConfig, *, is_tied: bool) -> None:
        """Let rows of tokens in the embedding be also those of a tied output matrix, unless that has its own."""
        embedding, head = (self.layouts.get((WHOLE_MODEL, name)) for name in ("embed_tokens", "lm_head"))
        if embedding is None or embedding.rows is None:
            return
        if is_tied and head is None:
            self.layouts[WHOLE_MODEL, "lm_head"] = replace(embedding, module="lm_head")
        elif is_tied and head is not None and head.rows is None:
            raise AdapterError(
                "", "it has rows of tokens for embed_tokens, to which the lm_head that it adapts is tied"
            )
        elif head is None and config.tokens_of("lm_head"):
            raise AdapterError("", "its rows of tokens for lm_head are those of embed_tokens, but the two are not tied")


class AdapterLoader:
    """Loads adapters for one base, from disk into host memory; safe on any thread.

    Args:
        shapes: the modules of the base that take an adapter.
        dtype: of the engine's activations.
        widths: for fused modules, the output widths of the parts that the device multiplies separately.
        open_base: entered once for each load, on its thread; what it yields is called only for an adapter whose effect
            depends on the base's weights.
        norm_offset: what the decoder adds to a checkpoint's norm weights.
        is_tied: the output matrix is the embedding.
        lay_out: called on the loading thread.
    """

    def __init__(
        self,
        shapes: ModuleShapes,
        max_rank: int,
        dtype: torch.dtype,
        open_base: Callable[[], AbstractContextManager[BaseTensors]],
        lay_out: LayOut = RawAdapter.scaled,
        widths: Mapping[str, Mapping[str, int]] | None = None,
        norm_offset: float = 0.0,
        *,
        is_tied: bool = False,
    ) -> None:
        self._widths = widths or {}
        self._norm_offset = norm_offset
        self._shapes = dict(shapes)
        self._dtype = dtype
        self._open_base = open_base
        self._lay_out = lay_out
        self._make_recipe = partial(_Recipe, shapes=self._shapes, max_rank=max_rank, is_tied=is_tied)
        self._known_recipe = lru_cache(MAX_RECIPES)(self._make_recipe)

    def load(self, ref: AdapterRef) -> AdapterWeights:
        """Load the adapter that a reference names.

        Raises:
            AdapterError: the files are missing or malformed, are not those that were declared, do not fit the base
                model, or hold numbers that are not finite in the engine's dtype.
        """
        config_bytes = read_config_bytes(ref.name, ref.path)
        recipe, data = read_with(
            ref.name, ref.path, lambda header, data_bytes: self._recipe(ref.name, config_bytes, header, data_bytes)
        )
        if recipe.digest.over(data) != ref.digest:
            # Serving other content under this digest would corrupt every cache that is keyed by it.
            raise AdapterError(ref.name, "the files of this version have been overwritten; load it again")
        tensors = TensorFile(entry_by_name=recipe.entry_by_name, data=data)
        try:
            with self._open_base() as base:
                read_base = partial(self._read_base, base)
                reader = _AdapterReader(ref.name, tensors, recipe.shapes, self._dtype, read_base, self._norm_offset)
                raw = reader.adapter(recipe.layouts)
        except NoBaseTensorError as error:
            raise AdapterError(
                ref.name,
                f"its effect depends on {error}, which the base's checkpoint has under another name, if at all",
            ) from error
        weights = self._lay_out(split_modules(raw, self._widths))
        if not weights.is_finite():
            raise AdapterError(ref.name, _find_not_finite(tensors, recipe.layouts, self._dtype))
        return weights

    def _read_base(self, base: BaseTensors, name: str) -> torch.Tensor:
        """Return a tensor of the base by the adapter's name for it, which may be a part or a fusion of base modules."""
        module, _, kind = name.rpartition(".")
        parts = [base(f"{stored}.{kind}")[rows] for stored, rows in stored_parts(self._shapes, module)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _recipe(self, name: str, config_bytes: bytes, header: bytes, data_bytes: int) -> _Recipe:
        is_small = len(config_bytes) + len(header) <= MAX_RECIPE_BYTES
        try:
            return (self._known_recipe if is_small else self._make_recipe)(config_bytes, header, data_bytes)
        except AdapterError as error:
            # A recipe is shared, so its errors lack the adapter's name.
            raise AdapterError(name, error.reason) from None


@dataclass(frozen=True, slots=True)
class _AdapterReader:
    """Builds one adapter's matrices from its file."""

    name: str
    tensors: TensorFile
    shapes: ModuleShapes
    dtype: torch.dtype
    base: BaseTensors
    norm_offset: float

    def adapter(self, layouts: Mapping[tuple[int, str], AdaptedModule]) -> RawAdapter:
        projections: dict[tuple[int, str], RawProjection] = {}
        columns: dict[tuple[int, str], Columns] = {}
        matrices: dict[str, torch.Tensor] = {}
        head: torch.Tensor | None = None
        for key, layout in layouts.items():
            self._check_base(layout)
            changed = None
            if layout.a is not None and layout.b is not None:
                a, b = self._tensor(layout.a), self._tensor(layout.b)
                if layout.stack is not None:
                    for expert, (own_a, own_b) in enumerate(zip(*unstack(a, b, layout.stack), strict=True)):
                        at = key[0], expert_module(expert, key[1].rpartition(".")[2])
                        projections[at] = RawProjection(a=own_a, b=own_b, scaling=layout.scaling)
                    continue
                gain = self._lengths(layout, a, b) if layout.magnitude is not None else None
                projections[key] = RawProjection(a=a, b=b, scaling=layout.scaling, gain=gain)
                changed = self._linear_columns(layout, gain)
            elif layout.rows is not None:
                projections[key] = self._row_changes(layout, layout.rows)
            elif layout.bias is not None:
                changed = self._linear_columns(layout, None)
            if layout.weight is not None and key[1].endswith("norm"):
                own, old = self._tensor(layout.weight).float(), self.base(f"{layout.module}.weight").float()
                # Also where both are 0, which would give NaN.
                ratio = ((own + self.norm_offset) / (old + self.norm_offset)).masked_fill_(own == old, 1.0)
                changed = Columns(gain=ratio, shift=torch.zeros_like(ratio))
            elif layout.weight is not None and layout.module == HEAD:
                head = self._tensor(layout.weight).to(torch.float32, copy=True)
            elif layout.weight is not None:
                matrices[key[1]] = self._tensor(layout.weight).to(self.dtype, copy=True)
            if changed is not None:
                columns[key] = changed
        extras = Extras(columns=columns, matrices=matrices, head=head)
        return RawAdapter(projections=projections, dtype=self.dtype, extras=extras)

    def _lengths(self, layout: AdaptedModule, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return DoRA's scale of each column: magnitude / |W + scaling B A|, [out] float32.

        Source: Liu et al., "DoRA" (2024, arXiv 2402.09353, section 4).
        """
        assert layout.magnitude is not None
        weight, a = self.base(f"{layout.module}.weight"), a.float() * layout.scaling
        if layout.module == EMBEDDING:
            # Stored [vocabulary, hidden]: the norms are over the vocabulary, one per hidden dimension.
            squares = torch.zeros(weight.shape[1])
            for at in range(0, len(weight), ROWS_AT_ONCE):
                part = slice(at, at + ROWS_AT_ONCE)
                squares += (weight[part].float() + a[:, part].T @ b.float().T).square().sum(dim=0)
            return self._tensor(layout.magnitude).float() / squares.sqrt()
        norms = [
            torch.linalg.vector_norm(
                weight[at : at + ROWS_AT_ONCE].float() + b[at : at + ROWS_AT_ONCE].float() @ a, dim=1
            )
            for at in range(0, len(weight), ROWS_AT_ONCE)
        ]
        return self._tensor(layout.magnitude).float() / torch.cat(norms)

    def _row_changes(self, layout: AdaptedModule, rows: TensorEntry) -> RawProjection:
        """Return the product that adds the difference of new and old rows: its input or its output is one-hot."""
        new, old = self._tensor(rows).float(), self.base(f"{layout.module}.weight")[list(layout.tokens)].float()
        chosen = one_hot(torch.tensor(layout.tokens), self.shapes[EMBEDDING][0]).to(self.dtype)
        if layout.module == EMBEDDING:
            # Their difference would be rounded. Taken apart and added in float32, they give exactly the new row, unless
            # one of its numbers is less than the last digit of the old one.
            return RawProjection(a=torch.cat((chosen, chosen)), b=torch.cat((-old, new)).T.contiguous(), scaling=1.0)
        return RawProjection(a=new - old, b=chosen.T.contiguous(), scaling=1.0)

    def _linear_columns(self, layout: AdaptedModule, gain: torch.Tensor | None) -> Columns | None:
        """Return the change of the base's output, which includes the base's bias; None if there is none."""
        if gain is None and layout.bias is None and layout.lora_bias is None:
            return None
        bias = f"{layout.module}.bias"
        old = self.base(bias).float() if bias in self.shapes else torch.zeros(self.shapes[layout.module][1])
        new = old if layout.bias is None else self._tensor(layout.bias).float()
        gain = torch.ones_like(old) if gain is None else gain
        shift = new - gain * old
        if layout.lora_bias is not None:
            shift += self._tensor(layout.lora_bias).float() * layout.scaling
        return Columns(gain=gain, shift=shift)

    def _check_base(self, layout: AdaptedModule) -> None:
        """Refuse an adapter that was trained with other embedding weights than the base's."""
        if layout.base_weight is None:
            return
        saved, own = self._tensor(layout.base_weight).to(self.dtype), self.base(f"{layout.module}.weight")
        if not torch.equal(saved, own):
            raise AdapterError(
                self.name, f"the weight of {layout.module} that was saved along with it is not that of the base model"
            )

    def _tensor(self, entry: TensorEntry) -> torch.Tensor:
        return _tensor(self.tensors, entry)


def unstack(a: torch.Tensor, b: torch.Tensor, stack: Stack) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous A [experts, rank, in] and B [experts, out, rank] from a file's stacked matrices.

    Where gate and up are one matrix, the result has the gate's rows before those of up, however the base orders them.

    Args:
        a, b: [experts * rank, in] and [out, rank * experts], or, swapped, [experts * rank, out] and [in, rank *
            experts].
    """
    by_expert = a.unflatten(0, (stack.num_experts, -1))
    by_rank = b.unflatten(1, (-1, stack.num_experts))
    if stack.is_swapped:
        return by_rank.permute(2, 1, 0).contiguous(), by_expert.transpose(1, 2).contiguous()
    if stack.is_paired:
        by_rank = by_rank.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
    return by_expert, by_rank.permute(2, 0, 1).contiguous()


def _tensor(tensors: TensorFile, entry: TensorEntry) -> torch.Tensor:
    """View a tensor of the file; shapes are non-empty by `validate`."""
    count = (entry.end - entry.start) // _TORCH_DTYPE[entry.dtype].itemsize
    flat = torch.frombuffer(tensors.data, dtype=_TORCH_DTYPE[entry.dtype], count=count, offset=entry.start)
    return flat.view(entry.shape)


def _find_not_finite(tensors: TensorFile, layouts: Mapping[tuple[int, str], AdaptedModule], dtype: torch.dtype) -> str:
    """Return the reason: the tensor that is not finite, or what overflows."""
    for name, entry in tensors.entry_by_name.items():
        if not _tensor(tensors, entry).isfinite().all():
            return f"tensor {name!r} holds NaN or infinity"
    if any(layout.magnitude is not None or layout.weight is not None for layout in layouts.values()):
        return "its numbers overflow, or the base has columns or norms of length 0 that it scales"
    return f"its numbers, scaled by alpha, overflow in {str(dtype).removeprefix('torch.')}"
