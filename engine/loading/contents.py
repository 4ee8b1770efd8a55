"""Checks the tensors in a checkpoint's files against those that config.json implies. Needs no torch.

No tensor may be missing or left over, and shapes and dtypes must match, before any weight data is read.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored import Stored
from engine.decoder.stored_int4 import StoredInt4
from engine.decoder.stored_mxfp4 import StoredMxfp4
from engine.decoder.tensor_kinds import TensorKind
from engine.errors import CheckpointError
from engine.loading.names import (
    EMBEDDING,
    HEAD,
    IGNORED_SUFFIXES,
    PREFIX_BY_PART,
    SIGHT,
    SIGHT_BESIDE,
    DecoderParameter,
    parameters,
)
from engine.loading.weight_files import open_whole, weight_files

if TYPE_CHECKING:
    import torch
    from safetensors import safe_open

PIECE_BYTES = 1 << 20


class WeightFile:
    """One open file of a checkpoint."""

    def __init__(self, path: Path, opened: safe_open) -> None:
        self.path = path
        self.opened = opened

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Half-open byte range of each tensor in the file."""
        with open(self.path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        return {name: (8 + size + start, 8 + size + end) for name, (start, end) in offsets.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, by its name in the file; valid while the context of `opened` is."""

    file: WeightFile
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file's header."""
        return tuple(self.file.opened.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """Dtype by its safetensors name."""
        return str(self.file.opened.get_slice(self.name).get_dtype())

    def read(self) -> torch.Tensor:
        """Return the whole tensor; the files must be opened for torch."""
        tensor: torch.Tensor = self.file.opened.get_tensor(self.name)
        return tensor

    def pieces(self) -> Iterator[bytes]:
        """Yield the tensor's bytes, `PIECE_BYTES` at a time."""
        start, end = self.file.spans[self.name]
        with open(self.file.path, "rb") as file:
            file.seek(start)
            for place in range(start, end, PIECE_BYTES):
                yield file.read(min(PIECE_BYTES, end - place))


@contextmanager
def opened(folder: Path, framework: str = "numpy") -> Iterator[Mapping[str, StoredTensor]]:
    """Open a checkpoint's files and yield its tensors by the names that `engine.loading.names` uses.

    Raises:
        CheckpointError: files are missing or broken, or two tensors have the same name.
    """
    with ExitStack() as stack:
        found: dict[str, StoredTensor] = {}
        for path in weight_files(folder):
            file = WeightFile(path, stack.enter_context(open_whole(path, framework=framework)))
            for name in file.opened.keys():  # noqa: SIM118  (safe_open is no mapping)
                if name in found:
                    raise CheckpointError(f"{path}: the tensor {name} is in another file of the checkpoint as well.")
                found[name] = StoredTensor(file, name)
        yield _as_of_whole(found)


def check_contents(model_path: str, spec: ModelSpec) -> None:
    """Check that the files of a checkpoint hold the tensors it needs, as loading does first.

    For a model that transformers computes, check only that they can be read: transformers has its own tensor names.

    Raises:
        CheckpointError: files or tensors are missing, truncated, left over, or of a wrong shape or dtype.
    """
    with opened(Path(model_path)) as tensors:
        if isinstance(spec, DecoderSpec):
            check_complete(model_path, spec, list(parameters(spec)), tensors)


def check_complete(
    where: str, spec: DecoderSpec, wanted: Sequence[DecoderParameter], tensors: Mapping[str, StoredTensor]
) -> None:
    """Check the tensors against the wanted parameters; raises as `check_contents`."""
    of_stored = spec.stored_shapes()
    kind_by_name: dict[str, TensorKind] = {}
    parts = ((name, parameter.shapes_in_file(shape)) for parameter in wanted for name, shape in parameter.parts)
    for name, shapes in parts:
        if spec.stored is not None and name.removesuffix(".weight") in of_stored:
            dtype = tensors[name].dtype if name in tensors else None
            kind_by_name |= spec.stored.tensors(name.removesuffix(".weight"), shapes[0], dtype)
        else:
            kind_by_name[name] = TensorKind(shapes)
    for name, kind in kind_by_name.items():
        _check_kind(where, name, kind, tensors.get(name))
    for name, tensor in tensors.items():
        if name in kind_by_name or name.endswith(IGNORED_SUFFIXES):
            continue
        if spec.is_tied and name == HEAD:
            _check_tied(where, tensor, tensors[EMBEDDING])
            continue
        stored = spec.stored if name.rpartition(".")[0] in of_stored else None
        if stored is None or not _changes_nothing(tensor, stored):
            raise CheckpointError(f"{where}: the tensor {name} is not part of a {spec.architecture}.")


def _as_of_whole(found: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return the tensors by a causal LM's names, also if the files hold a bare decoder or one in a larger model.

    Raises:
        CheckpointError: two tensors would get the same name.
    """
    if EMBEDDING in found:
        return {name: tensor for name, tensor in found.items() if not name.startswith(SIGHT_BESIDE)}
    prefixes = {"": "model.", **PREFIX_BY_PART}
    at = next((at for at, prefix in prefixes.items() if at + EMBEDDING.removeprefix(prefix) in found), None)
    if at is None:
        return found
    tensors: dict[str, StoredTensor] = {}
    for given, tensor in found.items():
        if at in PREFIX_BY_PART and given.startswith(SIGHT):
            continue
        name = prefixes[at] + given.removeprefix(at) if given.startswith(at) and given != HEAD else given
        if name in tensors:
            raise CheckpointError(f"{tensor.file.path}: {given} and {tensors[name].name} name the same tensor.")
        tensors[name] = tensor
    return tensors


def _check_kind(where: str, name: str, kind: TensorKind, found: StoredTensor | None) -> None:
    if found is None:
        raise CheckpointError(f"{where}: the tensor {name} is missing.")
    if kind.shapes is not None and found.shape not in kind.shapes:
        known = " or ".join(str(list(shape)) for shape in kind.shapes)
        raise CheckpointError(f"{where}: the tensor {name} has shape {list(found.shape)}, config.json says {known}.")
    if found.dtype not in kind.dtypes:
        raise CheckpointError(f"{where}: the tensor {name} has type {found.dtype}; known are {', '.join(kind.dtypes)}.")


def _check_tied(where: str, head: StoredTensor, embedding: StoredTensor) -> None:
    is_same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if not is_same or any(one != other for one, other in zip(head.pieces(), embedding.pieces(), strict=True)):
        raise CheckpointError(
            f"{where}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; set it to false if "
            f"{HEAD} is the output matrix, or remove that tensor."
        )


def _changes_nothing(tensor: StoredTensor, stored: Stored) -> bool:
    """Tell whether an extra tensor of a quantized module can be ignored.

    True for an all-zero bias; `g_idx` (the group of each input) if inputs are in order (no desc_act); static scales
    and zero points of inputs, which the engine quantizes per row or not at all; a redundant shape; and a weight format
    of 0 (row-major).
    """
    if isinstance(stored, StoredMxfp4):
        return False
    if isinstance(stored, StoredInt4) and tensor.name.endswith(".g_idx") and tensor.dtype == "I32":
        groups = array("i", b"".join(tensor.pieces())).tolist()
        return groups == [index // stored.group(len(groups)) for index in range(len(groups))]
    of_inputs = (".input_scale", ".activation_scale", ".input_zero_point", ".input_global_scale")
    if tensor.name.endswith((*of_inputs, ".weight_shape")):
        return True
    return tensor.name.endswith((".bias", ".weight_format")) and not any(map(any, tensor.pieces()))
