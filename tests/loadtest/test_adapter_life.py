from __future__ import annotations

import pytest

from loadtest.adapter_life import checked
from loadtest.measure import Exchange


def test_an_answer_that_failed_ends_the_measurement() -> None:
    good = Exchange(workload="w", model="m", started_s=0.0, status=200, error=None)
    assert checked(good) is good
    with pytest.raises(SystemExit, match="m: gone"):
        checked(Exchange(workload="w", model="m", started_s=0.0, status=503, error="gone"))
