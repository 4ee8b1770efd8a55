"""A request's answers are asked for once, and count as running from when the outcome is known until each has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.accounts.actor import Accounts
from deployments.accounts.joint_admission import JointAdmission
from deployments.accounts.values import Charge, TenantLimits
from deployments.config import AccountsConfig
from tests.deployments.accounts.test_meter import LocalHandle, a_meter

LIMITS = TenantLimits(input_tokens_per_minute=100, concurrent_requests=3)


@pytest.fixture
def handle(tmp_path: Path) -> LocalHandle:
    config = AccountsConfig(database_url=f"sqlite:///{tmp_path}/a.sqlite", spool_folder=str(tmp_path / "usage"))
    return LocalHandle(Accounts(config))


def of_three() -> JointAdmission:
    joint = JointAdmission("blue", LIMITS)
    for _ in range(3):
        joint.add(9)
    return joint


async def test_answers_are_asked_for_once_and_counted_one_by_one(handle: LocalHandle, tmp_path: Path) -> None:
    meter, joint, told = a_meter(handle, tmp_path), of_three(), list[str]()
    handle.heard = lambda name, *args: told.append(name)
    first, _ = await asyncio.gather(meter.begin(joint), meter.begin(joint))
    assert (told, first.quotas["input_tokens_per_minute"].remaining, meter._running["blue"]) == (["admit"], 73, 2)
    # The third begins later, when the outcome is known.
    assert (await meter.begin(joint), meter._running["blue"]) == (first, 3)
    refused = of_three()
    assert (await meter.begin(refused)).refused_by == "concurrent_requests"
    assert (await meter.begin(refused)).refused_by == "concurrent_requests"
    for count in (2, 1, 0):
        meter.release(Charge("blue", LIMITS, 0, 1))
        assert meter._running["blue"] == count


async def test_an_answer_whose_client_leaves_as_it_is_admitted_keeps_no_place(
    handle: LocalHandle, tmp_path: Path
) -> None:
    meter, joint = a_meter(handle, tmp_path), of_three()
    begins = [asyncio.ensure_future(meter.begin(joint)) for _ in range(3)]
    while joint.asked is None:
        await asyncio.sleep(0)
    # Called before the answers go on: of all that happens in between, nothing reports too few.
    counted = list[int]()

    def leave(asked: object) -> None:
        counted.append(meter._running["blue"])
        begins[0].cancel()

    joint.asked.add_done_callback(leave)
    await asyncio.wait(begins)
    assert ([begin.cancelled() for begin in begins], counted) == ([True, False, False], [3])
    assert meter._running["blue"] == 2
    await meter.settle()
    assert handle._actor._limiter.num_running("blue") == 2


async def test_places_that_all_clients_left_before_they_were_granted_are_free_at_once(
    handle: LocalHandle, tmp_path: Path
) -> None:
    meter, joint = a_meter(handle, tmp_path), of_three()
    leaving = asyncio.ensure_future(meter.begin(joint))
    while joint.asked is None:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving, joint.asked})
    assert leaving.cancelled()
    assert (await meter.begin(of_three())).refused_by is None
