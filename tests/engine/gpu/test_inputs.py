"""What the device sees of a step is what the host wrote, padded, whatever came before."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine.buffers import InputBuffers
from engine.config import ResolvedConfig
from engine.gpu.inputs import NO_SLOT, DeviceInputs
from engine.gpu.runtime import CudaRuntime
from engine.request import Request, RequestId, SamplingParams
from engine.step import StepPlan, StepRow
from tests.kernels.gpu.conftest import DEVICE

BLOCK_TOKENS, NULL = 4, 99
CONFIG = ResolvedConfig(
    model_path="",
    device="cpu",
    dtype="float32",
    num_threads=1,
    max_model_len=400,
    max_num_seqs=6,
    max_batched_tokens=64,
    block_tokens=BLOCK_TOKENS,
    num_blocks=NULL,
    enable_prefix_cache=True,
    max_queued_requests=1,
    max_adapter_rank=1,
    max_device_adapters=1,
    max_host_adapter_bytes=1 << 20,
)
PROMPT = tuple(range(300))


TWO_TABLES = replace(CONFIG, windows=(0, 40))


def row(index: int, start: int, end: int, *tables: list[int], is_admission: bool) -> StepRow:
    return StepRow(
        row=index,
        is_admission=is_admission,
        request=Request(request_id=RequestId(str(index)), prompt_ids=PROMPT, params=SamplingParams(max_tokens=1)),
        output_ids=[],
        start=start,
        end=end,
        block_tables=tables,
        samples=True,
    )


@pytest.mark.parametrize("config", [CONFIG, TWO_TABLES], ids=["one table", "two"])
def test_random_steps_are_seen_as_on_the_host(config: ResolvedConfig) -> None:
    """Requests come, grow by chunks and tokens, go, and give their rows to others."""
    draw = random.Random(3)
    host, device = InputBuffers(config, NULL), DeviceInputs(config, NULL, CudaRuntime(DEVICE), sizes=[1, 2, 4, 6])
    live: dict[int, tuple[int, list[list[int]]]] = {}
    for step in range(300):
        rows = []
        for index in draw.sample(range(6), draw.randint(1, 6)):
            is_admission = index not in live or draw.random() < 0.1
            start, tables = (draw.randrange(30), [[] for _ in config.windows]) if is_admission else live[index]
            end = min(start + draw.choice([1, 1, 1, 9]), len(PROMPT))
            if start >= end:
                del live[index]
                continue
            while len(tables[0]) * BLOCK_TOKENS < end:
                for blocks in tables:
                    blocks.append(draw.randrange(NULL))
            rows.append(row(index, start, end, *tables, is_admission=is_admission))
            live[index] = end, tables
        if not rows:
            continue
        plan = StepPlan(step_id=step, rows=tuple(sorted(rows, key=lambda r: r.num_tokens > 1)))
        expected, found = host.fill(plan), device.fill(plan)
        tokens, count = len(expected.token_ids), len(plan.rows)
        assert device.num_samples == len(expected.sampled)
        assert torch.equal(found.token_ids[:tokens].cpu(), expected.token_ids)
        assert torch.equal(found.positions[:tokens].cpu(), expected.positions)
        assert torch.equal(found.sampled[: device.num_samples].cpu(), expected.sampled)
        for table, (seen, wanted) in enumerate(zip(found.attention, expected.attention, strict=True)):
            assert torch.equal(seen.slots[:tokens].cpu(), wanted.slots)
            assert torch.equal(seen.rows[:count].cpu(), wanted.rows)
            for planned in plan.rows:
                blocks = planned.block_tables[table]
                assert seen.tables[planned.row, : len(blocks)].tolist() == list(blocks)
            assert seen.slots[tokens:].eq(NO_SLOT).all()
            assert seen.rows[count:, 2].eq(0).all()
        if all(planned.num_tokens == 1 for planned in plan.rows):
            assert len(found.token_ids) == found.attention[0].num_decodes == device.padded(count)
        else:
            assert len(found.token_ids) == tokens


def test_a_batch_is_padded_to_the_next_size() -> None:
    inputs = DeviceInputs(CONFIG, NULL, CudaRuntime(DEVICE), sizes=[1, 4, 900])
    assert [inputs.padded(count) for count in (1, 2, 4, 5)] == [1, 4, 4, 5]
    assert inputs.padding(4).attention[0].rows[:, 2].eq(0).all()


def test_padding_lies_where_later_steps_lie() -> None:
    inputs = DeviceInputs(replace(CONFIG, max_num_seqs=2), NULL, CudaRuntime(DEVICE), sizes=[2])
    padding = inputs.padding(2)
    batch = inputs.fill(StepPlan(step_id=1, rows=(row(0, 5, 6, [7, 8], is_admission=True),)))
    for name in ("token_ids", "positions", "sampled"):
        assert getattr(padding, name).data_ptr() == getattr(batch, name).data_ptr()
    assert padding.attention[0].tables.data_ptr() == batch.attention[0].tables.data_ptr()


def test_addresses_are_those_that_kernels_were_compiled_for_whatever_the_bounds_are() -> None:
    config = replace(TWO_TABLES, max_num_seqs=3, max_batched_tokens=7, max_model_len=19 * BLOCK_TOKENS)
    inputs = DeviceInputs(config, NULL, CudaRuntime(DEVICE), sizes=[2])
    batch = inputs.fill(StepPlan(step_id=1, rows=(row(0, 5, 6, [7, 8], [9, 3], is_admission=True),)))
    staged = [batch.token_ids, batch.positions, batch.sampled]
    staged += [part for seen in batch.attention for part in (seen.slots, seen.rows)]
    assert {(tensor.data_ptr() - inputs._staging.device.data_ptr()) % 16 for tensor in staged} == {0}
    first, second = (seen.tables for seen in batch.attention)
    assert (second.data_ptr() - first.data_ptr()) % 16 == 0
