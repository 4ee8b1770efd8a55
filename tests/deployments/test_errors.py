from __future__ import annotations

import errno

import pytest

from deployments.errors import UnavailableError, unavailable_on


def test_who_waits_for_a_full_disk_is_told_to_come_back(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnavailableError) as told, unavailable_on(OSError, KeyError):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert told.value.retry_after_s > 0
    assert "No space left on device" in caplog.text


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="odd"), unavailable_on(OSError, KeyError):
        raise ValueError("odd")
