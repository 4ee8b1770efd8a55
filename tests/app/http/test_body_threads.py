from __future__ import annotations

import asyncio
import threading

import pytest

from app.http.body_threads import NUM_PLACES, BodyThreads


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


async def test_one_flow_s_bodies_do_not_hold_up_another_s(gate: threading.Event) -> None:
    """Sixteen bodies of one tenant, all of them refused in the end, held up everybody's larger requests for 35 s."""
    threads = BodyThreads()
    held = [asyncio.create_task(threads.run("a", gate.wait)) for _ in range(50)]
    await asyncio.sleep(0)
    assert await threads.run("b", threading.current_thread) is not threading.main_thread()
    assert not any(task.done() for task in held)
    gate.set()
    assert all(await asyncio.gather(*held))


async def test_whoever_leaves_frees_no_thread_that_still_works(gate: threading.Event) -> None:
    threads, begun = BodyThreads(), threading.Semaphore(0)

    def work() -> bool:
        begun.release()
        return gate.wait()

    left = [asyncio.create_task(threads.run("a", work)) for _ in range(NUM_PLACES)]
    await asyncio.gather(*(asyncio.to_thread(begun.acquire) for _ in left))
    for task in left:
        task.cancel()
    late = asyncio.create_task(threads.run("a", work))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in left)
    assert not begun.acquire(blocking=False)
    gate.set()
    assert await late
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*left, return_exceptions=True))


async def test_what_goes_wrong_on_a_thread_is_told_to_who_asked() -> None:
    with pytest.raises(ZeroDivisionError):
        await BodyThreads().run("a", lambda: 1 / 0)
