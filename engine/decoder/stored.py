"""Weights that a checkpoint has in fewer bits than it is computed with: which layout `quantization_config` names."""

from __future__ import annotations

from collections.abc import Mapping

from engine.decoder.stored_fields import COMPRESSED, PACKED
from engine.decoder.stored_fp8 import FP8_METHODS, StoredFp8, parse_fp8
from engine.decoder.stored_int4 import INT4_METHODS, StoredInt4, parse_int4, parse_packed
from engine.decoder.stored_mxfp4 import MXFP4, StoredMxfp4
from engine.errors import CheckpointError

Stored = StoredInt4 | StoredFp8 | StoredMxfp4


def parse_stored(fields: object, where: str) -> Stored:
    """Read `quantization_config`.

    Raises:
        CheckpointError: it asks for what is not supported; the message names the field.
    """
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"{where}: quantization_config is no JSON object.")
    method = fields.get("quant_method")
    if method in INT4_METHODS:
        return parse_int4(fields, where)
    if method == COMPRESSED and fields.get("format") == PACKED:
        return parse_packed(fields, where)
    if method in FP8_METHODS:
        return parse_fp8(fields, where)
    if method == MXFP4:
        return StoredMxfp4()
    known = ", ".join((*INT4_METHODS, *FP8_METHODS, MXFP4))
    raise CheckpointError(
        f"{where}: quantization_config.quant_method is {method!r}; of quantized weights those of {known} are read."
    )
