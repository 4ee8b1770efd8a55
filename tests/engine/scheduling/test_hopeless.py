from __future__ import annotations

from engine.request import FinishReason
from engine.scheduling.hopeless import DEADLINE_LOST, MAX_LOOK_S
from engine.scheduling.live_request import LiveRequest
from tests.engine.scripted import Harness, a_config, a_request
from tests.engine.simulated import ExactCosts

MACHINE = ExactCosts(base_s=0.01, row_s=0.002, token_s=0.0005)


def test_those_who_have_time_are_looked_at_seldom_and_end_as_soon_as_they_are_lost() -> None:
    now_s, looks = [0.0], []
    harness = Harness(a_config(max_num_seqs=1, max_model_len=2000, num_blocks=600), clock=lambda: now_s[0])
    scheduler = harness.scheduler
    scheduler.admission.costs = MACHINE
    asked = scheduler.admission.spare_s

    def counted(live: LiveRequest, now_s: float, *, num_rows: int, margin: float) -> float:
        looks.append(now_s)
        return asked(live, now_s, num_rows=num_rows, margin=margin)

    scheduler.admission.spare_s = counted  # type: ignore[method-assign]
    harness.add(a_request("runs", max_tokens=1500), a_request("waits", max_tokens=50, deadline_s=10.0))
    lost_s = 10.0 - (50 * MACHINE.step_s(1) + MACHINE.prompt_s(3))
    while harness.reason("waits") is None and now_s[0] < 10:
        harness.step()
        now_s[0] += 0.01
    assert harness.reason("waits") is FinishReason.EXPIRED
    assert harness.emissions["waits"][-1].error == DEADLINE_LOST
    assert lost_s <= now_s[0] - 0.01 <= lost_s + 0.02
    # Two forecasts a look: alone, and beside those that run. Once hurried, only the first.
    assert len(looks) <= 2 * lost_s / MAX_LOOK_S + 60 < now_s[0] / 0.01
