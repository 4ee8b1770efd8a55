"""Benchmarks of whole engine steps on random weights against the device's floor: reading weights and cache once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from adapters.identity import AdapterRef
from adapters.registry import reference
from engine.build import build_engine
from engine.config import EngineConfig
from engine.costs import cache_bytes, num_step_weights, product_flop, prompt_flop, step_weight_bytes
from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored_mxfp4 import StoredMxfp4
from engine.engine import Engine
from engine.fallback.spec import FallbackSpec
from engine.loading.mxfp4 import Mxfp4Weight
from engine.loading.names import DecoderParameter, parameters
from engine.loading.spec import read_model_spec
from engine.loading.weight import Weight
from kernels.streamed_linear.layout import BYTES_PER_WEIGHT
from loadtest.engine_alone import EngineAlone, Generated
from loadtest.geometries import CONFIG_BY_NAME, MXFP4_EXPONENT, WEIGHT_STD, write_checkpoint
from loadtest.gpu.parts import Attempt
from loadtest.gpu.timing import Ceilings
from loadtest.workloads import TokenRange, token_prompt

RANK = 16
ANSWER_TOKENS = 65
WARM_UP_CONTEXT = 1024
"""Bound on a decode's context in warm-up: compilation and allocation do not depend on it, and long prompts are slow."""
ADAPTER_BYTES = 8 << 30
"""Device memory for adapters: 64 of rank 16 for 8 billion weights take 5.4 GB."""
Build = Callable[[EngineConfig, Sequence[AdapterRef], Any], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One row of the table.

    Attributes:
        target: minimum of `of_floor`; None for no target. With adapters, the floor is the time of the same row without.
        num_adapters: number of adapters that the requests are spread over; 0 for none.
        quantization, kv_cache_dtype: options of the engine that runs it.
        is_traced: whether its steps are also traced, kernel by kernel, after all rows have been measured.
    """

    model: str
    batch: int
    context: int
    answer_tokens: int = ANSWER_TOKENS
    num_adapters: int = 0
    target: float | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    is_traced: bool = False

    @property
    def title(self) -> str:
        """The row's title."""
        kind = "prefill" if self.answer_tokens == 1 else "decode"
        adapters = f", {self.num_adapters} adapters" if self.num_adapters else ""
        weights = f", {self.quantization} weights" if self.quantization else ""
        cache = f", {self.kv_cache_dtype} cache" if self.kv_cache_dtype else ""
        return f"{self.model} {kind}, batch {self.batch}, context {self.context}{adapters}{weights}{cache}"

    @property
    def options(self) -> dict[str, str | None]:
        """The engine options that the row sets."""
        return {"quantization": self.quantization, "kv_cache_dtype": self.kv_cache_dtype}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Measurements of one row; times of one step in milliseconds (of the whole prompt for a prefill).

    Attributes:
        bytes_ms, flop_ms: times of reading the bytes and of computing the FLOP of a step at the measured rates.
        floor_ms: the longer of the two; with adapters, the time of the same row without.
        num_compiled: kernels compiled or loaded during the measurement; should be 0.
    """

    title: str
    step_ms: float
    bytes_ms: float
    flop_ms: float
    floor_ms: float
    of_floor: float
    target: float | None
    tokens_per_s: float
    num_compiled: int
    ms_by_part: dict[str, float]

    @property
    def verdict(self) -> str:
        """Whether the target is met; empty without a target."""
        return "" if self.target is None else "met" if self.of_floor >= self.target else "MISSED"

    @property
    def host_ms(self) -> float:
        """Host time of a mean step: all but waiting for the device."""
        return self.step_ms - self.ms_by_part["wait"]


Tracer = Callable[[Sequence[tuple[Result, Callable[[], object]]]], None]
"""Called with each traced row's result and a function that runs it again."""

BF16_DECODE = Work(model="llama-3.1-8b", batch=64, context=1024, target=0.80, is_traced=True)
FP8_DECODE = Work(
    model="llama-3.1-8b", batch=64, context=1024, quantization="fp8", kv_cache_dtype="fp8", is_traced=True
)
SMALL_DECODE = Work(model="qwen3-0.6b", batch=1, context=1024, target=0.60, is_traced=True)
CROWDED_DECODE = Work(model="qwen3-0.6b", batch=256, context=512, is_traced=True)
WORKS_BY_MODEL: dict[str, tuple[Work, ...]] = {
    "llama-3.1-8b": (
        Work(model="llama-3.1-8b", batch=1, context=8192, answer_tokens=1, target=0.70),
        Work(model="llama-3.1-8b", batch=1, context=1024, target=0.90, is_traced=True),
        BF16_DECODE,
        Work(model="llama-3.1-8b", batch=32, context=8192, target=0.80),
        Work(model="llama-3.1-8b", batch=64, context=1024, num_adapters=1, target=1 / 1.06, is_traced=True),
        Work(model="llama-3.1-8b", batch=64, context=1024, num_adapters=8, target=1 / 1.08),
        Work(model="llama-3.1-8b", batch=64, context=1024, num_adapters=16),
        Work(model="llama-3.1-8b", batch=64, context=1024, num_adapters=64, target=1 / 1.12, is_traced=True),
        Work(model="llama-3.1-8b", batch=64, context=1024, kv_cache_dtype="int8"),
        Work(model="llama-3.1-8b", batch=64, context=1024, kv_cache_dtype="fp8"),
        Work(model="llama-3.1-8b", batch=32, context=8192, kv_cache_dtype="fp8"),
        FP8_DECODE,
        Work(model="llama-3.1-8b", batch=1, context=1024, quantization="fp8", kv_cache_dtype="fp8"),
        Work(model="llama-3.1-8b", batch=1, context=8192, answer_tokens=1, quantization="fp8", kv_cache_dtype="fp8"),
        Work(model="llama-3.1-8b", batch=1, context=1024, quantization="int4"),
        Work(model="llama-3.1-8b", batch=16, context=1024, quantization="int4"),
        Work(model="llama-3.1-8b", batch=64, context=1024, quantization="int4"),
        Work(model="llama-3.1-8b", batch=64, context=1024, num_adapters=8, quantization="int4"),
        Work(model="llama-3.1-8b", batch=1, context=8192, answer_tokens=1, quantization="int4"),
    ),
    "qwen3-0.6b": (SMALL_DECODE, CROWDED_DECODE),
    "seed-oss-0.6b": (
        Work(model="seed-oss-0.6b", batch=1, context=1024),
        Work(model="seed-oss-0.6b", batch=256, context=512),
    ),
    "qwen3-30b-a3b": (
        Work(model="qwen3-30b-a3b", batch=1, context=1024),
        Work(model="qwen3-30b-a3b", batch=64, context=1024),
        Work(model="qwen3-30b-a3b", batch=1, context=8192, answer_tokens=1),
        Work(model="qwen3-30b-a3b", batch=1, context=1024, quantization="int4"),
        Work(model="qwen3-30b-a3b", batch=64, context=1024, quantization="int4"),
    ),
    "gpt-oss-20b": (
        Work(model="gpt-oss-20b", batch=1, context=1024),
        Work(model="gpt-oss-20b", batch=64, context=1024),
        Work(model="gpt-oss-20b", batch=1, context=8192, answer_tokens=1),
    ),
}


def random_weights(
    path: str, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Weight]]:
    """Yield a decoder's parameters, random, on their device: an `engine.loading.checkpoint.WeightSource`."""
    of_stored = spec.stored_shapes() if isinstance(spec.stored, StoredMxfp4) else {}
    for parameter in parameters(spec):
        if parameter.parts[0][0] in of_stored:
            yield parameter.name, _random_mxfp4(parameter, dtype, device)
            continue
        tensor = torch.empty(parameter.shape, dtype=torch.float32 if parameter.is_wide else dtype, device=device)
        yield parameter.name, tensor.fill_(1.0) if tensor.dim() == 1 else tensor.normal_(0.0, WEIGHT_STD)


def _random_mxfp4(parameter: DecoderParameter, dtype: torch.dtype, device: torch.device) -> Mxfp4Weight:
    experts, out, depth = parameter.shape
    blocks = torch.randint(0, 256, (experts * out, depth // 2), dtype=torch.uint8, device=device)
    exponents = torch.full((experts * out, depth // 32), MXFP4_EXPONENT, dtype=torch.uint8, device=device)
    return Mxfp4Weight(blocks=blocks, exponents=exponents, dtype=dtype)


def step_bytes(spec: ModelSpec, work: Work, element_bytes: int) -> float:
    """Return the bytes that one decode step must read: weights, and the KV cache at half of the answers' length."""
    context = work.context + work.answer_tokens / 2
    cache = work.batch * cache_bytes(spec, context, element_bytes if work.kv_cache_dtype is None else 1)
    num_weights = num_step_weights(spec, work.batch)
    weights = step_weight_bytes(spec, element_bytes, work.batch)
    if work.quantization is not None:
        held = BYTES_PER_WEIGHT if work.quantization == "int4" else 1
        weights -= (element_bytes - held) * (num_weights - spec.vocab_size * spec.hidden_size)
    return weights + cache


def step_flop(spec: ModelSpec, work: Work) -> tuple[float, float]:
    """Return the FLOP of one decode step at half of the answers' length, or of whole prompts: in bfloat16, in fp8."""
    if work.answer_tokens == 1:
        products, num_flop = product_flop(spec, work.context), prompt_flop(spec, work.context)
    else:
        context = work.context + work.answer_tokens // 2
        products = product_flop(spec, 1)
        num_flop = prompt_flop(spec, context + 1) - prompt_flop(spec, context)
        num_flop += 2.0 * spec.vocab_size * spec.hidden_size
    in_fp8 = products if work.quantization == "fp8" else 0.0
    return work.batch * (num_flop - in_fp8), work.batch * in_fp8


def groups() -> dict[str, list[Work]]:
    """Return the rows that one engine can run, by a name made of the model and its options."""
    found: dict[str, list[Work]] = {}
    for model, works in WORKS_BY_MODEL.items():
        for options, alike in groupby(works, key=lambda work: work.options):
            found["-".join([model, *(f"{value}_{name.split('_')[0]}" for name, value in options.items() if value)])] = (
                list(alike)
            )
    return found


def measure(
    works: Sequence[Work],
    ceilings: Ceilings,
    build: Build = build_engine,
    *,
    attempt: Attempt = nullcontext,
    trace: Tracer | None = None,
    **changes: Any,
) -> Iterator[Result]:
    """Run rows with the same options on one engine, and yield each result at once; `changes` override its settings.

    Rows with `is_traced` are passed to `trace` only after all results, so that a failing trace loses none.
    """
    model = works[0].model
    with TemporaryDirectory() as folder:
        path = Path(folder)
        spec = write_config(path, CONFIG_BY_NAME[model])
        if isinstance(spec, FallbackSpec):
            # Transformers reads its weights itself.
            write_checkpoint(CONFIG_BY_NAME[model], path)
        refs = write_adapters(path / "adapters", spec, max(work.num_adapters for work in works))
        config = EngineConfig(
            model_path=folder,
            max_model_len=max(work.context for work in works) + ANSWER_TOKENS,
            max_num_seqs=max(work.batch for work in works),
            max_device_adapters=max(1, len(refs)),
            max_adapter_rank=RANK,
            max_device_adapter_bytes=ADAPTER_BYTES if refs else 1,
            max_queued_requests=512,
            **dict[str, Any](device="cuda", dtype="bfloat16", max_batched_tokens=8192) | works[0].options | changes,
        )
        alone = EngineAlone(build(config, refs, random_weights))
        plain: dict[tuple[int, int, int], Result] = {}
        again: list[tuple[Result, Callable[[], object]]] = []
        try:
            for work in works:
                with attempt(work.title):
                    found = _run(alone, work, spec, refs, ceilings)
                    key = work.batch, work.context, work.answer_tokens
                    if not work.num_adapters:
                        plain[key] = found
                    if work.is_traced:
                        again.append((found, partial(_generate, alone, work, spec, refs, "traced")))
                    yield _against(plain.get(key), found) if work.num_adapters else found
            if trace is not None and again:
                with attempt("trace"):
                    trace(again)
        finally:
            alone.close()


def write_config(folder: Path, config: dict[str, Any]) -> ModelSpec:
    """Write the configuration of a model whose weights come from elsewhere, and return what the engine reads in it."""
    whole = {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2} | config
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    return read_model_spec(str(folder))


def write_adapters(folder: Path, spec: ModelSpec, count: int) -> list[AdapterRef]:
    """Write adapters for all linear modules: hard links to one tensor file, each with its own scaling."""
    if not count:
        return []
    modules = sorted({name.rpartition(".")[2] for name in spec.adapted_shapes()})
    tensors = {}
    for name, (depth, width) in spec.adapted_shapes().items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, depth, dtype=torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(width, RANK, dtype=torch.bfloat16) / 1000
    folder.mkdir()
    save_file(tensors, folder / "tensors")
    refs = []
    for number in range(count):
        path = folder / f"a{number}"
        path.mkdir()
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK + number, "target_modules": modules}
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        (path / "adapter_model.safetensors").hardlink_to(folder / "tensors")
        refs.append(reference(path.name, str(path)))
    return refs


def _generate(
    alone: EngineAlone, work: Work, spec: ModelSpec, refs: Sequence[AdapterRef], seed: str, context: int | None = None
) -> Generated:
    """Run a row once, with its own context length or another; different seeds have different prompts."""
    adapters = [refs[row % work.num_adapters].digest if work.num_adapters else None for row in range(work.batch)]
    ids = TokenRange(start=min(300, spec.vocab_size // 2), end=spec.vocab_size)
    # Seed by title as well: otherwise prompts of other rows would hit in the prefix cache.
    prompts = [
        token_prompt(context or work.context, seed=f"{seed}/{work.title}/{row}", ids=ids) for row in range(work.batch)
    ]
    return alone.generate(prompts, [work.answer_tokens] * work.batch, adapters)


def _run(alone: EngineAlone, work: Work, spec: ModelSpec, refs: Sequence[AdapterRef], ceilings: Ceilings) -> Result:
    is_prefill = work.answer_tokens == 1
    once = partial(_generate, alone, work, spec, refs)
    once("warm-up", work.context if is_prefill else min(work.context, WARM_UP_CONTEXT))
    with compilations() as compiled:
        found = once("measured")
    split = found.prefill_split if is_prefill else found.full_split
    step_s = found.prefill_s if is_prefill else split.wall_ms / 1000
    bytes_s, flop_s = ceilings.floor_s(step_bytes(spec, work, 2), 0), ceilings.floor_s(0, *step_flop(spec, work))
    floor_s = max(bytes_s, flop_s)
    return Result(
        title=work.title,
        step_ms=step_s * 1000,
        bytes_ms=bytes_s * 1000,
        flop_ms=flop_s * 1000,
        floor_ms=floor_s * 1000,
        of_floor=floor_s / step_s,
        target=work.target,
        tokens_per_s=work.batch * (work.context if is_prefill else 1) / step_s,
        num_compiled=len(compiled),
        ms_by_part=split.ms_by_part,
    )


def _against(plain: Result | None, found: Result) -> Result:
    """Compare a row with adapters to the same row without; drop the target if that one failed."""
    if plain is None:
        return replace(found, target=None)
    return replace(found, floor_ms=plain.step_ms, of_floor=plain.step_ms / found.step_ms)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the names of kernels that Triton compiles or loads during the block."""
    import triton

    found: list[str] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda *, src, **_rest: found.append(src.name)
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before
