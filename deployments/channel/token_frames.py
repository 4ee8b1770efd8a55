"""Encode the output of an engine step for all requests of one gateway as one frame. Pure: struct, no pickle.

All numbers are little-endian. A frame and its emissions:

    frame     length u32 (bytes that follow) | magic b"AF" | version u8 | reserved u8 = 0 | count u32 | emission * count
    emission  id length u16 | error length u16 (0xffff: none) | cached tokens u32 | accepted u32 | rejected u32
              | token count u32 | finish u8 | bytes of log-probabilities u32 | of the prompt's u32 | of the vector u32
              | id (UTF-8) | token ids i32 * count | log-probabilities, the prompt's | vector | error (UTF-8)
    log-probabilities, with no count in front:
              (top tokens u16 | logprob f32 | rank u32 | (token id i32 | logprob f32) * top tokens) * entries

Example: request "r1" samples token 7 and ends by length; three prompt tokens came from the prefix cache; 51 bytes:

    2f000000 4146 04 00 01000000
    0200 ffff 03000000 00000000 00000000 01000000 02 00000000 00000000 00000000   7231 07000000

Bytes that do not decode exactly to the last one raise `FrameError`: every length is checked against the bytes present.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from engine.request import Emission, FinishReason, RequestId, TokenLogprobs

MAGIC = b"AF"
VERSION = 4
MAX_FRAME_BYTES = 16 << 20
MAX_ID_BYTES = 1024
MAX_ERROR_BYTES = 4096
LENGTH = struct.Struct("<I")

_HEADER = struct.Struct("<2sBBI")
_EMISSION = struct.Struct("<HHIIIIBIII")
_LOGPROBS = struct.Struct("<HfI")
_TOP = struct.Struct("<if")
_FINISH_REASONS = (None, *FinishReason)
"""A reason's code is its place."""
_FINISH_CODES = {reason: code for code, reason in enumerate(_FINISH_REASONS)}
_NO_ERROR = 0xFFFF


class FrameError(ValueError):
    """Bytes that are not a valid frame, or an emission that does not fit into one."""


def encode_frame(emissions: Sequence[Emission]) -> bytes:
    """Return one frame, including its length prefix. Error texts are cut to 4096 bytes at a character boundary.

    Raises:
        FrameError: a request id, a number or the whole frame is out of bounds.
    """
    parts = [b"", _HEADER.pack(MAGIC, VERSION, 0, len(emissions))]
    for emission in emissions:
        parts.extend(_emission_parts(emission))
    length = sum(map(len, parts))
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is over the bound of {MAX_FRAME_BYTES}")
    parts[0] = LENGTH.pack(length)
    return b"".join(parts)


def decode_length(prefix: bytes) -> int:
    """Return how many bytes follow the four-byte prefix.

    Raises:
        FrameError: the length is too small for any frame, or over the bound.
    """
    (length,) = LENGTH.unpack(prefix)
    if not _HEADER.size <= length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is not within {_HEADER.size} and {MAX_FRAME_BYTES}")
    return int(length)


def decode_body(body: bytes) -> tuple[Emission, ...]:
    """Return the emissions of a frame without its length prefix.

    Raises:
        FrameError: the bytes are not exactly a frame of this version.
    """
    if len(body) < _HEADER.size:
        raise FrameError("a frame ends within its header")
    magic, version, reserved, count = _HEADER.unpack_from(body)
    if magic != MAGIC or reserved != 0:
        raise FrameError("not a token frame")
    if version != VERSION:
        raise FrameError(f"a frame of version {version}; this end speaks {VERSION}")
    emissions = []
    offset = _HEADER.size
    for _ in range(count):
        emission, offset = _decode_emission(body, offset)
        emissions.append(emission)
    if offset != len(body):
        raise FrameError(f"{len(body) - offset} bytes too many at the end of a frame")
    return tuple(emissions)


def payload_bytes(emission: Emission) -> int:
    """Return the approximate size in bytes of an emission in a frame; buffers are bounded by it."""
    num_scored = len(emission.logprobs) + len(emission.prompt_logprobs)
    num_top = sum(len(entry.top) for entry in (*emission.logprobs, *emission.prompt_logprobs)) if num_scored else 0
    numbers = 4 * len(emission.token_ids) + 10 * num_scored + 8 * num_top
    return _EMISSION.size + len(emission.request_id) + numbers + len(emission.pooled or b"") + len(emission.error or "")


def coalesce(emissions: Sequence[Emission]) -> list[Emission]:
    """Merge the emissions of several steps into one per request, ordered by first appearance."""
    by_request: dict[RequestId, list[Emission]] = {}
    for emission in emissions:
        by_request.setdefault(emission.request_id, []).append(emission)
    return [_joined(parts) for parts in by_request.values()]


def _joined(parts: Sequence[Emission]) -> Emission:
    last = parts[-1]
    if len(parts) == 1:
        return last
    return Emission(
        request_id=last.request_id,
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        finish_reason=last.finish_reason,
        num_cached_tokens=last.num_cached_tokens,
        num_accepted=last.num_accepted,
        num_rejected=last.num_rejected,
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        prompt_logprobs=tuple(entry for part in parts for entry in part.prompt_logprobs),
        pooled=last.pooled,
        error=last.error,
    )


def _emission_parts(emission: Emission) -> tuple[bytes, ...]:
    try:
        request_id = emission.request_id.encode()
    except UnicodeEncodeError as error:
        raise FrameError("a request id is not valid Unicode") from error
    if not 0 < len(request_id) <= MAX_ID_BYTES:
        raise FrameError(f"a request id of {len(request_id)} bytes is not within 1 and {MAX_ID_BYTES}")
    error_text = b"" if emission.error is None else _clipped(emission.error)
    vector = emission.pooled or b""
    try:
        token_ids = struct.pack(f"<{len(emission.token_ids)}i", *emission.token_ids)
        logprobs, prompt_logprobs = _packed(emission.logprobs), _packed(emission.prompt_logprobs)
        head = _EMISSION.pack(
            len(request_id),
            _NO_ERROR if emission.error is None else len(error_text),
            emission.num_cached_tokens,
            emission.num_accepted,
            emission.num_rejected,
            len(emission.token_ids),
            _FINISH_CODES[emission.finish_reason],
            len(logprobs),
            len(prompt_logprobs),
            len(vector),
        )
    except struct.error as error:
        raise FrameError(f"a number in an emission of {emission.request_id!r} is out of bounds") from error
    if min(emission.token_ids, default=0) < 0:
        raise FrameError(f"a token id in an emission of {emission.request_id!r} is negative")
    return head, request_id, token_ids, logprobs, prompt_logprobs, vector, error_text


def _decode_emission(body: bytes, offset: int) -> tuple[Emission, int]:
    if offset + _EMISSION.size > len(body):
        raise FrameError("a frame ends within the head of an emission")
    id_length, error_length, *counts, num_tokens, finish, num_scored, num_prompt, num_vector = _EMISSION.unpack_from(
        body, offset
    )
    has_error = error_length != _NO_ERROR
    is_sane = 0 < id_length <= MAX_ID_BYTES and finish < len(_FINISH_REASONS)
    if not is_sane or (has_error and error_length > MAX_ERROR_BYTES):
        raise FrameError("the head of an emission is out of bounds")
    id_start = offset + _EMISSION.size
    ids_start = id_start + id_length
    logprobs_start = ids_start + 4 * num_tokens
    prompt_start = logprobs_start + num_scored
    vector_start = prompt_start + num_prompt
    error_start = vector_start + num_vector
    end = error_start + (error_length if has_error else 0)
    if end > len(body):
        raise FrameError("a frame ends within an emission")
    token_ids = struct.unpack_from(f"<{num_tokens}i", body, ids_start)
    if min(token_ids, default=0) < 0:
        raise FrameError("a token id is negative")
    try:
        request_id = body[id_start:ids_start].decode()
        error = body[error_start:end].decode() if has_error else None
    except UnicodeDecodeError as fault:
        raise FrameError("a text in a frame is not UTF-8") from fault
    emission = Emission(
        request_id=RequestId(request_id),
        token_ids=token_ids,
        finish_reason=_FINISH_REASONS[finish],
        num_cached_tokens=counts[0],
        num_accepted=counts[1],
        num_rejected=counts[2],
        logprobs=_unpacked(body[logprobs_start:prompt_start]) if num_scored else (),
        prompt_logprobs=_unpacked(body[prompt_start:vector_start]) if num_prompt else (),
        pooled=body[vector_start:error_start] or None,
        error=error,
    )
    return emission, end


def _clipped(text: str) -> bytes:
    return text.encode("utf-8", "replace")[:MAX_ERROR_BYTES].decode("utf-8", "ignore").encode()


def _packed(entries: Sequence[TokenLogprobs]) -> bytes:
    parts = []
    for entry in entries:
        parts.append(_LOGPROBS.pack(len(entry.top), entry.logprob, entry.rank))
        parts.extend(_TOP.pack(*pair) for pair in entry.top)
    return b"".join(parts)


def _unpacked(packed: bytes) -> tuple[TokenLogprobs, ...]:
    entries = []
    offset = 0
    while offset < len(packed):
        if offset + _LOGPROBS.size > len(packed):
            raise FrameError("log-probabilities end within the head of an entry")
        num_top, logprob, rank = _LOGPROBS.unpack_from(packed, offset)
        offset += _LOGPROBS.size
        end = offset + num_top * _TOP.size
        if end > len(packed):
            raise FrameError("log-probabilities end within an entry")
        entries.append(TokenLogprobs(logprob, tuple(_TOP.iter_unpack(packed[offset:end])), rank))
        offset = end
    return tuple(entries)
