from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kernels import compiling, native
from kernels.program import Pool, Program


def chain(pool: Pool, length: int, rows: int, width: int) -> tuple[Program, torch.Tensor, list[torch.Tensor]]:
    """A program whose every op reads all that the one before it wrote: rows shuffled again and again."""
    program, count = Program(pool), torch.tensor([rows])
    steps = [torch.randn(rows, width)]
    orders = [torch.randperm(rows) for _ in range(length)]
    for order in orders:
        steps.append(torch.zeros(rows, width))
        program.add("take_rows", torch.float32, count, (steps[-2], order, steps[-1]), (width,))
    expected = steps[0].clone()
    for order in orders:
        expected = expected[order]
    return program, expected, steps


def test_each_op_sees_all_that_came_before(pool: Pool) -> None:
    program, expected, steps = chain(pool, length=200, rows=101, width=3)
    for _ in range(20):
        for step in steps[1:]:
            step.zero_()
        program.run()
        assert torch.equal(steps[-1], expected)


def test_a_program_reads_counts_and_numbers_as_they_are_now(pool: Pool) -> None:
    count, x, out = torch.tensor([3]), torch.randn(8, 2), torch.zeros(8, 2)
    program = Program(pool)
    program.add("take_rows", torch.float32, count, (x, torch.arange(8), out), (2,))
    program.run()
    assert torch.equal(out[:3], x[:3])
    assert out[3:].eq(0).all()
    count[0] = 8
    x.fill_(5)
    program.run()
    assert out.eq(5).all()
    count[0] = 0
    out.zero_()
    program.run()
    assert out.eq(0).all()


def test_what_follows_waits_for_all_that_began_beside_each_other(pool: Pool) -> None:
    count, none, width, orders = torch.tensor([101]), torch.tensor([0]), 3, [torch.randperm(101) for _ in range(3)]
    x, left, right, out, other = torch.randn(101, width), *(torch.zeros(101, width) for _ in range(4))
    program = Program(pool)
    for _ in range(50):
        program.add("take_rows", torch.float32, count, (x, orders[0], left), (width,))
        program.add("take_rows", torch.float32, count, (x, orders[1], right), (width,), begins_beside=True)
        program.add("take_rows", torch.float32, none, (x, orders[1], out), (width,))
        program.add("take_rows", torch.float32, count, (left, orders[2], out), (width,))
        program.add("take_rows", torch.float32, count, (right, orders[2], other), (width,), begins_beside=True)
        program.add("take_rows", torch.float32, count, (out, orders[0], x), (width,))
    expected, last = x.clone(), x
    program.run()
    for _ in range(50):
        last = expected[orders[1]][orders[2]]
        expected = expected[orders[0]][orders[2]][orders[0]]
    assert torch.equal(x, expected)
    assert torch.equal(other, last)


def test_programs_of_any_length_share_a_pool(pool: Pool) -> None:
    for length in (1, 300, 2):
        program, expected, steps = chain(pool, length, rows=30, width=1)
        program.run()
        assert torch.equal(steps[-1], expected)
    Program(pool).run()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is a process's")
def test_a_pool_s_own_threads_stand_back_as_far_as_they_are_told() -> None:
    kernels = native.load()
    assert kernels is not None
    mine, own = os.getpriority(os.PRIO_PROCESS, 0), Pool(kernels, 3, niceness=4)
    program, expected, steps = chain(own, length=20, rows=40, width=2)
    deadline_s = time.monotonic() + 30
    while num_threads_at(min(19, mine + 4)) < 2:
        assert time.monotonic() < deadline_s
        program.run()
    program.run()
    assert torch.equal(steps[-1], expected)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def num_threads_at(niceness: int) -> int:
    count = 0
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # Others of this process end meanwhile.
            count += os.getpriority(os.PRIO_PROCESS, int(thread)) == niceness
    return count


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_pools_come_and_go_and_do_not_meet(pool: Pool, num_threads: int) -> None:
    kernels = native.load()
    assert kernels is not None
    failures: list[str] = []

    def work() -> None:
        own = Pool(kernels, num_threads)
        for _ in range(5):
            program, expected, steps = chain(own, length=20, rows=40, width=2)
            program.run()
            if not torch.equal(steps[-1], expected):
                failures.append("another result")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_process_that_ends_leaves_its_pools_to_who_runs_in_them(pool: Pool) -> None:
    """An engine's thread goes on with its step as the process ends; it died of a pool that was gone."""
    code = """
from kernels import native
from kernels.program import Pool
kernels = native.load()
kernels.destroy_pool = lambda handle: print("destroyed")
pool, other = Pool(kernels, 2), Pool(kernels, 2)
del other
print("ends")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["destroyed", "ends"]


def test_nobody_comes_late_to_a_run_that_is_over_however_many_there_were(compiler: str, tmp_path: Path) -> None:
    """Runs are numbered in 32 bits, and 0 stood for no run: whoever came late to that one read ops that were gone."""
    (source := tmp_path / "late.cpp").write_text("""
#include "panels.h"
#include <atomic>
#include <memory>
#include <thread>
#define private public
#include "program.cpp"
static std::atomic<bool> is_over{true};
static std::atomic<int64_t> late{0};
static int64_t kernel(const Op &, int64_t unit) {
    late += is_over;
    return unit < 0 ? 4 : 0;
}
int main() {
    Pool pool(4);
    const int64_t count = 1, wish = 0;
    Op op{};
    op.kernel = kernel, op.count = &count;
    for (int64_t run = 0; run < 300 && !late; run++) {
        pool.generation = 0xffffffff;
        pool.generation.notify_all();
        is_over = false;
        pool.run(&op, 1, &wish);
        is_over = true;
        for (int64_t turn = 0; turn < 1000 && !late; turn++)
            std::this_thread::yield();
    }
    return late != 0;
}
""")
    flags = ("-std=c++20", "-O1", "-pthread", f"-I{compiling.SOURCES[0].parent}")
    subprocess.run([compiler, *flags, str(source), "-o", str(tmp_path / "late")], check=True)
    assert subprocess.run([tmp_path / "late"], check=False).returncode == 0


def pausing_chain(pool: Pool, length: int) -> tuple[Program, torch.Tensor, torch.Tensor]:
    """A program over one place, so that an op that runs twice, or not at all, is seen; every third op may pause."""
    program, count, width = Program(pool), torch.tensor([61]), 2
    x, other = torch.randn(61, width), torch.zeros(61, width)
    expected = x.clone()
    for index in range(length):
        order = torch.randperm(61)
        program.add("take_rows", torch.float32, count, (x, order, other), (width,), may_pause=index % 3 == 2)
        program.add("take_rows", torch.float32, count, (other, torch.arange(61), x), (width,))
        expected = expected[order]
    return program, expected, x


def test_a_run_pauses_where_it_may_and_goes_on_from_there(pool: Pool) -> None:
    program, expected, x = pausing_chain(pool, 20)
    program.pause_flag.set()
    stops = []
    while not stops or stops[-1] < len(program):
        stops.append(program.run(stops[-1] if stops else 0))
    assert stops == [*range(4, 40, 6), 40]
    assert torch.equal(x, expected)


def test_a_wish_that_comes_and_goes_while_it_runs_loses_no_op_and_runs_none_twice(pool: Pool) -> None:
    num_pauses = 0
    for _ in range(30):
        program, expected, x = pausing_chain(pool, 300)
        is_over = threading.Event()

        def wish(program: Program = program, is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                program.pause_flag.set()
                program.pause_flag.clear()

        thread = threading.Thread(target=wish)
        thread.start()
        at = 0
        while at < len(program):
            at = program.run(at)
            num_pauses += at < len(program)
        is_over.set()
        thread.join()
        assert torch.equal(x, expected)
    assert num_pauses


def test_a_call_takes_as_many_tensors_sizes_and_numbers_as_an_op_has(pool: Pool) -> None:
    x, indices, found = torch.randn(3, 4), torch.tensor([2, 0]), torch.zeros(2, 4)
    pool.call("take_rows", torch.float32, 2, (x, indices, found, *[None] * 7), (4, *[0] * 7), (0.0, 0.0))
    assert torch.equal(found, x[indices])
    for tensors, sizes, numbers in (([None] * 11, (), ()), ((), [0] * 9, ()), ((), (), [0.0] * 3)):
        with pytest.raises(struct.error):
            pool.call("take_rows", torch.float32, 0, tensors, sizes, numbers)


def test_an_unknown_kernel_is_an_error(pool: Pool) -> None:
    with pytest.raises(AttributeError):
        pool.call("no_such_kernel", torch.float32, 1, (), ())
