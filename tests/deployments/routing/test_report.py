from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.token_frames import LENGTH, FrameError, encode_frame
from deployments.routing.report import MAGIC, LoadReport, decode_report, encode_report, is_report

counts = st.integers(0, (1 << 32) - 1)
rates = st.floats(0, 1e12)
marks = st.lists(st.integers(0, (1 << 64) - 1), max_size=5)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
reports = st.builds(
    LoadReport,
    model=names,
    replica_id=names,
    queued_tokens=counts,
    num_running=counts,
    num_waiting=counts,
    max_running=st.integers(1, (1 << 32) - 1),
    num_gateways=counts,
    block_tokens=st.integers(1, 0xFFFF),
    landmark_blocks=st.integers(0, 0xFFFF),
    prefill_tokens_per_s=rates,
    step_s=rates,
    turnover_s=rates,
    stalled_s=rates,
    adapter_load_s=rates,
    is_whole=st.booleans(),
    landmarks_added=marks,
    landmarks_dropped=marks,
    adapters_on_device=marks,
    adapters_coming=marks,
    adapters_dropped=marks,
    seen=st.lists(names, max_size=4),
)


def body_of(report: LoadReport) -> bytes:
    encoded = encode_report(report)
    assert LENGTH.unpack(encoded[: LENGTH.size]) == (len(encoded) - LENGTH.size,)
    return encoded[LENGTH.size :]


@given(reports)
def test_a_report_arrives_as_it_was_sent(report: LoadReport) -> None:
    assert decode_report(body_of(report)) == report


@given(reports, st.data())
def test_damage_is_refused_or_is_a_report(report: LoadReport, data: st.DataObject) -> None:
    body = bytearray(body_of(report))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(body)))
    for damaged in (bytes(body), bytes(body[:cut]), bytes(body) + b"\0"):
        with contextlib.suppress(FrameError):
            assert isinstance(decode_report(damaged), LoadReport)


def test_tokens_are_no_report() -> None:
    assert not is_report(encode_frame([])[LENGTH.size :])
    assert is_report(body_of(LoadReport(model="m", replica_id="r")))


@pytest.mark.parametrize("told", [b"", b"[]", b"1", b'{"model": "m"}', b'{"model": "m", "replica_id": "r", "x": 1}'])
def test_what_is_no_report_is_refused(told: bytes) -> None:
    with pytest.raises(FrameError, match="a report cannot be read"):
        decode_report(MAGIC + told)
