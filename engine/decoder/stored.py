"""Quantized checkpoints: parse the layout of the weights from `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from engine.decoder.fields import check_fields
from engine.decoder.json_file import read_json
from engine.decoder.stored_fp8 import FP8, StoredFp8, parse_fp8, parse_fp8_group
from engine.decoder.stored_int4 import COMPRESSED, INT4_METHODS, StoredInt4, parse_int4, parse_int4_group
from engine.decoder.stored_mxfp4 import MXFP4, StoredMxfp4
from engine.decoder.stored_numbers import (
    BITSANDBYTES,
    MODELOPT,
    NVFP4_OF_MODELOPT,
    StoredBnb4,
    StoredInt8,
    StoredNvfp4,
    parse_bitsandbytes,
    parse_int8_group,
    parse_nvfp4_group,
)
from engine.errors import CheckpointError

Stored = StoredInt4 | StoredFp8 | StoredMxfp4 | StoredInt8 | StoredBnb4 | StoredNvfp4
"""`title` is the name of the format, for messages; `stays`, whether a kernel multiplies by the weights as stored."""


def stored_of(folder: Path, config: Mapping[str, object], where: str) -> Stored | None:
    """Return the layout of a checkpoint's quantized weights, None if not quantized; ModelOpt may use a separate file.

    Raises:
        CheckpointError: as `parse_stored`, or the separate file cannot be read.
    """
    fields, beside = config.get("quantization_config"), folder / "hf_quant_config.json"
    if fields is None and beside.is_file():
        fields = read_json(beside).get("quantization")
        fields = {"quant_method": MODELOPT, **fields} if isinstance(fields, Mapping) else fields
    return None if fields is None else parse_stored(fields, where)


def parse_stored(fields: object, where: str) -> Stored:
    """Parse `quantization_config`.

    Raises:
        CheckpointError: a value is not supported; the message names the field.
    """
    within = f"{where}: quantization_config"
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"{within} is not a JSON object.")
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in _PARSER_BY_METHOD:
        known = ", ".join(_PARSER_BY_METHOD)
        raise CheckpointError(f"{within}.quant_method is {method!r}; supported are {known}.")
    return _PARSER_BY_METHOD[method](fields, within)


def _parse_compressed(fields: Mapping[str, object], within: str) -> Stored:
    """Parse the layout of `config_groups`, which must be the same in all."""
    check_fields(fields, {"format": tuple(_GROUP_PARSER_BY_FORMAT), "transform_config": (None, {})}, within)
    sparsity = fields.get("sparsity_config")
    check_fields(
        sparsity if isinstance(sparsity, Mapping) else {}, {"format": ("dense", None)}, f"{within}.sparsity_config"
    )
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{within}.config_groups is not a JSON object with members.")
    found = set()
    for name, group in groups.items():
        place = f"{within}.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
            raise CheckpointError(f"{place} has no weights.")
        check_fields(group, {"output_activations": (None,), "format": (fields["format"], None)}, place)
        found.add(_GROUP_PARSER_BY_FORMAT[str(fields["format"])](group, weights, place))
    if len(found) > 1:
        raise CheckpointError(f"{within}.config_groups has {len(found)} groups of weights; only one is supported.")
    return found.pop()


def _parse_naive_group(group: Mapping[str, object], weights: Mapping[str, object], within: str) -> Stored:
    """Parse a group of the older name for two formats, which have the same tensors."""
    parse = parse_fp8_group if weights.get("type") == "float" else parse_int8_group
    return parse(group, weights, within)


def _parse_modelopt(fields: Mapping[str, object], within: str) -> Stored:
    check_fields(fields, {"quant_algo": tuple(_STORED_BY_ALGORITHM)}, within)
    return _STORED_BY_ALGORITHM[str(fields["quant_algo"])]


_GROUP_PARSER_BY_FORMAT: dict[str, Callable[[Mapping[str, object], Mapping[str, object], str], Stored]] = {
    "float-quantized": parse_fp8_group,
    "naive-quantized": _parse_naive_group,
    "pack-quantized": parse_int4_group,
    "int-quantized": parse_int8_group,
    "nvfp4-pack-quantized": parse_nvfp4_group,
}
"""They return the layout from a group of compressed-tensors, its `weights` and its location for messages."""
_STORED_BY_ALGORITHM: dict[str, Stored] = {
    "FP8": StoredFp8(),
    "FP8_PER_CHANNEL_PER_TOKEN": StoredFp8(has_row_scales=True),
    "NVFP4": NVFP4_OF_MODELOPT,
    "W4A16_NVFP4": NVFP4_OF_MODELOPT,
}
_PARSER_BY_METHOD: dict[str, Callable[[Mapping[str, object], str], Stored]] = {
    **dict.fromkeys(INT4_METHODS, parse_int4),
    COMPRESSED: _parse_compressed,
    FP8: parse_fp8,
    MXFP4: lambda fields, within: StoredMxfp4(),
    BITSANDBYTES: parse_bitsandbytes,
    MODELOPT: _parse_modelopt,
}
