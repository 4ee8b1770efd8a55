"""What a person left open is answered from the checkpoint and the machine; what cannot be is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.decoder.reading import read_spec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored import Stored
from engine.decoder.stored_fp8 import StoredFp8
from engine.decoder.stored_int4 import StoredInt4
from engine.decoder.stored_mxfp4 import StoredMxfp4
from engine.decoder.stored_numbers import StoredInt8
from engine.errors import ConfigError
from engine.resolve import LENT_PAGE_BYTES, MAX_UNASKED_BLOCKS, Hardware, check, resolve
from tests.deployments.tiny_models import CONTEXT, write_chat_model

PLAIN = Hardware(device="cpu", num_cores=3, free_bytes=1 << 30, host_bytes=1 << 30, has_fast_bfloat16=False)
FAST = Hardware(device="cpu", num_cores=3, free_bytes=1 << 30, host_bytes=1 << 30, has_fast_bfloat16=True)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    return read_spec(str(write_chat_model(tmp_path_factory.mktemp("chat"))))


def config(**options: object) -> EngineConfig:
    return EngineConfig(model_path="", **options)  # type: ignore[arg-type]


def test_what_is_left_open_follows_the_checkpoint_and_the_machine(spec: DecoderSpec) -> None:
    resolved = resolve(config(), spec, PLAIN)
    assert (resolved.dtype, resolved.num_threads, resolved.max_model_len) == ("float32", 3, CONTEXT)
    assert resolve(config(), spec, FAST).dtype == "bfloat16"
    assert resolved.max_blocks_per_request == CONTEXT // 16
    # No more than every row at full length can ever use.
    assert resolved.num_rows == 68
    assert resolved.num_blocks == 68 * CONTEXT // 16


def test_the_cache_holds_what_its_bytes_hold(spec: DecoderSpec) -> None:
    block_bytes = 16 * spec.kv_bytes_per_token(4)
    blocks = CONTEXT // 16 + 3
    assert resolve(config(kv_cache_bytes=block_bytes * blocks + 1), spec, PLAIN).num_blocks == blocks
    # More than all rows use hold prefixes of requests that have ended.
    many = 100 * CONTEXT
    assert resolve(config(kv_cache_bytes=block_bytes * many), spec, PLAIN).num_blocks == many


def test_layers_with_a_window_need_no_room_for_what_lies_before_it(spec: DecoderSpec) -> None:
    """Of as many layers with a window as without; of a text in the window, it is none."""
    windowed = tuple(replace(form, window=32) for form in spec.layers)
    half = replace(spec, layers=(*spec.layers, *windowed), max_position=4096)
    least = config(max_batched_tokens=16, kv_cache_bytes=1)
    found = resolve(config(max_batched_tokens=16), half, PLAIN)
    assert found.windows == (0, 32)
    # 4,096 tokens, and at most what a window, a tile of keys and two steps touch.
    most = 4096 // 16 + (32 + 128 + 2 * 16) // 16 + 2
    needed = most * 16 * spec.kv_bytes_per_token(4)
    with pytest.raises(ConfigError, match=f"{needed} bytes are needed"):
        resolve(least, half, PLAIN)
    assert resolve(replace(least, kv_cache_bytes=needed), half, PLAIN).num_blocks == most
    assert resolve(config(max_model_len=32), half, PLAIN).windows == (0,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": CONTEXT + 1}, ("max_model_len", str(CONTEXT + 1), str(CONTEXT))),
        ({"kv_cache_bytes": 1000}, ("kv_cache_bytes", "1000", "bytes are needed")),
        ({"block_tokens": 10**30}, (f"One block has block_tokens {10**30}.",)),
        ({"dtype": "int8"}, ("dtype", "int8", "bfloat16")),
        ({"dtype": "float16"}, ("dtype", "float16", "cpu")),
        ({"quantization": "int3"}, ("quantization", "int3", "int8", "fp8", "int4")),
        ({"quantization": "fp8"}, ("quantization", "fp8", "cuda", "cpu")),
        ({"kv_cache_dtype": "fp4"}, ("kv_cache_dtype", "fp4", "int8", "fp8")),
        ({"kv_cache_dtype": "int8"}, ("kv_cache_dtype", "int8", "cuda", "cpu")),
        *(
            ({name: 0}, (name, "0"))
            for name in ("max_num_seqs", "max_batched_tokens", "block_tokens", "max_model_len", "num_threads")
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_and_numbers(
    spec: DecoderSpec, options: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(config(**options), spec, PLAIN)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("free_bytes", "options", "words"),
    [
        (4096, {}, "gpu_memory_fraction: 0.9 leaves the cache 4096 bytes"),
        # Others hold more of the device than the fraction leaves to them.
        (-4096, {}, "gpu_memory_fraction: 0.9 leaves the cache 0 bytes"),
        (1 << 30, {"kv_cache_bytes": 1000}, "kv_cache_bytes: 1000 bytes"),
    ],
)
def test_a_cache_too_small_for_one_request_names_what_makes_it_larger(
    spec: DecoderSpec, free_bytes: int, options: dict[str, object], words: str
) -> None:
    gpu = replace(PLAIN, device="cuda", free_bytes=free_bytes)
    with pytest.raises(ConfigError) as refused:
        resolve(config(**options), spec, gpu)
    assert str(refused.value).startswith(words)


def test_a_cache_too_small_on_a_gpu_names_all_that_takes_its_room(spec: DecoderSpec) -> None:
    """What a step takes by its tokens, and what is kept for adapters, is off the free bytes before they are told."""
    gpu = replace(PLAIN, device="cuda", free_bytes=4096)
    lower = r"Raise it, or lower max_model_len"
    with pytest.raises(ConfigError, match=lower + r" or max_batched_tokens \(\d+\)"):
        resolve(config(), spec, gpu)
    with pytest.raises(ConfigError, match=lower + r", max_device_adapter_bytes \(99\).* or max_batched_tokens"):
        resolve(config(max_device_adapter_bytes=99), spec, gpu)
    with pytest.raises(ConfigError) as refused:
        resolve(config(kv_cache_bytes=1000), spec, gpu)
    assert "lower" not in str(refused.value)


def test_a_cache_on_a_gpu_takes_all_that_is_left(spec: DecoderSpec) -> None:
    gpu = replace(PLAIN, device="cuda", free_bytes=1 << 22)
    blocks = (1 << 22) // (16 * spec.kv_bytes_per_token(4))
    assert resolve(config(dtype="float32"), spec, gpu).num_blocks == blocks
    roomy = replace(gpu, free_bytes=1 << 40)
    assert resolve(config(dtype="float32"), spec, roomy).num_blocks == MAX_UNASKED_BLOCKS
    in_use = resolve(config(dtype="float32", enable_prefix_cache=False), spec, roomy)
    assert in_use.num_blocks == 64 * CONTEXT // 16


def test_adapters_on_the_device_are_bounded_by_their_bytes(spec: DecoderSpec) -> None:
    gpu = replace(PLAIN, device="cuda", free_bytes=32 << 22)
    assert resolve(config(), spec, gpu).max_device_adapter_bytes == 1 << 22
    assert resolve(config(max_device_adapter_bytes=7), spec, gpu).max_device_adapter_bytes == 7
    assert resolve(config(max_device_adapters=3), spec, PLAIN).max_device_adapters == 3
    with pytest.raises(ConfigError, match="max_device_adapter_bytes: 0"):
        resolve(config(max_device_adapter_bytes=0), spec, PLAIN)


def test_adapters_on_the_host_take_a_share_of_what_is_free_and_on_a_cpu_they_are_those_of_the_device(
    spec: DecoderSpec,
) -> None:
    found = resolve(config(), spec, PLAIN)
    assert found.max_host_adapter_bytes == found.max_device_adapter_bytes == 1 << 28
    assert resolve(config(), spec, replace(PLAIN, host_bytes=1 << 40)).max_host_adapter_bytes == 32 << 30
    found = resolve(config(max_host_adapter_bytes=5, max_device_adapter_bytes=3), spec, PLAIN)
    assert (found.max_host_adapter_bytes, found.max_device_adapter_bytes) == (5, 3)
    with pytest.raises(ConfigError, match="max_host_adapter_bytes: 0"):
        resolve(config(max_host_adapter_bytes=0), spec, PLAIN)


def test_only_a_gpu_lends_of_its_cache_and_a_full_request_fits_beside(spec: DecoderSpec) -> None:
    gpu = replace(PLAIN, device="cuda", free_bytes=32 << 22)
    assert resolve(config(), spec, PLAIN).lent_run_blocks == 0
    found = resolve(config(dtype="float32"), spec, gpu)
    assert found.lent_run_blocks * 16 * spec.kv_size * 4 >= LENT_PAGE_BYTES
    assert found.max_lent_blocks == found.num_blocks // 4
    all_of_it = resolve(config(max_lent_cache_share=1.0, max_num_seqs=2), spec, gpu)
    assert all_of_it.max_lent_blocks == all_of_it.num_blocks - all_of_it.max_blocks_per_request > 0
    assert resolve(config(max_lent_cache_share=0.0), spec, gpu).max_lent_blocks == 0
    with pytest.raises(ConfigError, match=r"max_lent_cache_share: 1.5 is not between 0 and 1"):
        resolve(config(max_lent_cache_share=1.5), spec, gpu)


NEW_GPU = replace(FAST, device="cuda", has_fp8=True, has_fp8_products=True)


@pytest.mark.parametrize(
    ("options", "gpu", "words"),
    [
        ({"quantization": "int8"}, NEW_GPU, ("quantization", "int8", "cpu", "cuda")),
        ({"quantization": "fp8"}, replace(NEW_GPU, has_fp8_products=False), ("quantization", "fp8", "9.0")),
        ({"quantization": "fp8", "dtype": "float16"}, NEW_GPU, ("quantization", "fp8", "float16")),
        ({"quantization": "int4", "dtype": "float32"}, NEW_GPU, ("quantization", "int4", "float32")),
        ({"kv_cache_dtype": "fp8"}, replace(NEW_GPU, has_fp8=False), ("kv_cache_dtype", "fp8", "int8")),
    ],
)
def test_what_a_gpu_does_not_have_is_refused_by_name(
    spec: DecoderSpec, options: dict[str, object], gpu: Hardware, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(config(**options), spec, gpu)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_fp8_products_want_sizes_that_they_can_multiply(spec: DecoderSpec) -> None:
    assert resolve(config(quantization="fp8"), replace(spec, intermediate_size=64), NEW_GPU).quantization == "fp8"
    with pytest.raises(ConfigError, match=r"quantization.* 72"):
        resolve(config(quantization="fp8"), replace(spec, intermediate_size=72), NEW_GPU)


def test_weights_that_have_four_bits_stay_so_on_a_gpu(spec: DecoderSpec) -> None:
    """And are plain numbers on a CPU, which may be rounded as others are."""
    gpu = replace(FAST, device="cuda", has_fp8=True, has_fp8_products=True)
    stored = replace(spec, hidden_size=128, intermediate_size=256, num_heads=8, head_dim=64)
    stored = replace(stored, stored=StoredInt4(method="awq", group_size=128))
    assert resolve(config(), stored, gpu).quantization == "int4"
    assert resolve(config(quantization="int4", dtype="float16"), stored, gpu).quantization == "int4"
    assert resolve(config(), stored, FAST).quantization is None
    assert resolve(config(quantization="int8"), stored, FAST).quantization == "int8"
    with pytest.raises(ConfigError, match="'fp8', but the checkpoint's weights have 4 bits already"):
        resolve(config(quantization="fp8"), stored, gpu)
    with pytest.raises(ConfigError, match="dtype is 'float32'"):
        resolve(config(dtype="float32"), stored, gpu)


@pytest.mark.parametrize("stored", [StoredInt4(method="gptq", group_size=128, has_order=True), StoredInt8()])
def test_weights_that_nothing_multiplies_by_are_rounded_as_numbers_are(spec: DecoderSpec, stored: Stored) -> None:
    wide = replace(spec, hidden_size=128, intermediate_size=256, num_heads=8, head_dim=64, stored=stored)
    for wanted in (None, "fp8", "int4"):
        assert resolve(config(quantization=wanted), wide, NEW_GPU).quantization == wanted


def test_weights_that_have_eight_bits_stay_so_where_they_are_multiplied(spec: DecoderSpec) -> None:
    """And are numbers elsewhere, which may be rounded as others are."""
    wide = replace(spec, hidden_size=128, intermediate_size=256, num_heads=8, head_dim=64)
    stored = replace(wide, stored=StoredFp8())
    assert resolve(config(), stored, NEW_GPU).quantization == "fp8"
    assert resolve(config(quantization="fp8"), stored, NEW_GPU).quantization == "fp8"
    assert resolve(config(), replace(wide, stored=StoredMxfp4()), NEW_GPU).quantization is None
    assert resolve(config(quantization="fp8"), replace(wide, stored=StoredMxfp4()), NEW_GPU).quantization == "fp8"
    assert resolve(config(quantization="int4"), stored, NEW_GPU).quantization == "int4"
    assert resolve(config(), stored, replace(NEW_GPU, has_fp8_products=False)).quantization is None
    assert resolve(config(dtype="float16"), stored, NEW_GPU).quantization is None
    assert resolve(config(), replace(stored, intermediate_size=72), NEW_GPU).quantization is None
    assert resolve(config(), replace(wide, stored=StoredFp8(block=(128, 128))), NEW_GPU).quantization is None
    assert resolve(config(), stored, FAST).quantization is None
    assert resolve(config(quantization="int8"), stored, FAST).quantization == "int8"
    with pytest.raises(ConfigError, match="'fp8' is for device 'cuda'"):
        resolve(config(quantization="fp8"), stored, FAST)


def test_weights_of_four_bits_want_whole_groups_of_inputs(spec: DecoderSpec) -> None:
    wide = replace(spec, hidden_size=256, num_heads=2, head_dim=64, intermediate_size=384)
    assert resolve(config(quantization="int4"), wide, NEW_GPU).quantization == "int4"
    with pytest.raises(ConfigError, match=r"quantization.* 128 .* 400"):
        resolve(config(quantization="int4"), replace(wide, intermediate_size=400), NEW_GPU)


@pytest.mark.parametrize("held", ["int8", "fp8"])
def test_a_cache_of_one_byte_a_number_holds_nearly_twice_the_tokens(spec: DecoderSpec, held: str) -> None:
    wide = replace(spec, num_heads=4, num_kv_heads=2, head_dim=128)
    gpu = replace(NEW_GPU, free_bytes=16 * wide.kv_bytes_per_token(2) * 100)
    found = resolve(config(kv_cache_dtype=held, max_model_len=64), wide, gpu)
    assert found.num_blocks == 100 * 128 * 2 // (128 + 4)
    assert found.kv_cache_dtype == held


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, "dtype: 'float16' on device 'cpu'"),
        ({"quantization": "fp8"}, "quantization: 'fp8' is for device 'cuda'"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes: "),
    ],
)
def test_what_no_machine_could_serve_is_refused_before_one_is_looked_at(
    spec: DecoderSpec, options: dict[str, object], words: str
) -> None:
    check(config(), spec)
    check(config(device="cuda", quantization="fp8", dtype="bfloat16"), replace(spec, hidden_size=64))
    with pytest.raises(ConfigError) as refused:
        check(config(**options), spec)
    assert str(refused.value).startswith(words)


def test_tiers_are_refused_where_they_could_not_be(spec: DecoderSpec) -> None:
    block = 1 << 20
    for fields, match in (
        ({"kv_disk_bytes": 5}, r"kv_disk_bytes: 5 bytes cannot hold one block of the KV cache, \d+"),
        ({"kv_disk_bytes": block, "enable_prefix_cache": False}, "kv_disk_bytes: .*enable_prefix_cache is false"),
        ({"kv_disk_folder": "/kv"}, "kv_disk_folder: '/kv', but kv_disk_bytes is 0"),
        ({"kv_host_bytes": block}, "kv_host_bytes: on device 'cpu' .* raise kv_cache_bytes"),
    ):
        with pytest.raises(ConfigError, match=match):
            resolve(config(**fields), spec, PLAIN)
    found = resolve(config(kv_disk_bytes=block, kv_disk_folder="/kv"), spec, PLAIN)
    assert (found.kv_disk_bytes, found.kv_disk_folder) == (block, "/kv")


def test_a_tier_in_host_memory_that_is_not_free_is_refused(spec: DecoderSpec) -> None:
    """The process was killed where it allocated the tier, in a container without a word."""
    gpu = replace(PLAIN, device="cuda", host_bytes=100 << 30)
    with pytest.raises(ConfigError, match=f"kv_host_bytes: {101 << 30}, but {100 << 30} bytes of memory are free"):
        resolve(config(kv_host_bytes=101 << 30), spec, gpu)
    check(config(device="cuda", kv_host_bytes=101 << 30), spec)


def test_adapters_have_their_share_of_the_host_memory_that_a_tier_leaves(spec: DecoderSpec) -> None:
    gpu = replace(PLAIN, device="cuda", host_bytes=100 << 30)
    found = [resolve(config(kv_host_bytes=used << 30), spec, gpu).max_host_adapter_bytes for used in (0, 60, 100)]
    assert found == [25 << 30, 10 << 30, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithStates(DecoderSpec):
    """Of which each row keeps 4 MB instead of keys."""

    def state_bytes(self, element_bytes: int) -> int:
        return element_bytes << 20


def with_states(spec: DecoderSpec) -> WithStates:
    long = replace(spec, max_position=1 << 16)
    return WithStates(**{name: getattr(long, name) for name in long.__dataclass_fields__})


FEW: dict[str, Any] = {"max_num_seqs": 16, "dtype": "float32"}


def test_states_take_of_a_cpus_share(spec: DecoderSpec) -> None:
    rows = with_states(spec)
    plain, found = (
        resolve(config(**FEW), replace(spec, max_position=1 << 16), PLAIN),
        resolve(config(**FEW), rows, PLAIN),
    )
    block_bytes, room = 16 * spec.kv_bytes_per_token(4), int(PLAIN.free_bytes * 0.2)
    assert plain.num_blocks == room // block_bytes
    # A third of what those of seventeen rows leave is for states at the ends of prefixes.
    room -= 17 * (4 << 20)
    assert found.num_snapshots == room // 3 // (4 << 20) == 11
    assert found.num_blocks == (room - 11 * (4 << 20)) // block_bytes
    assert (plain.num_snapshots, plain.num_speculative_tokens) == (0, 16)
    assert (found.enable_prefix_cache, found.num_speculative_tokens) == (True, 0)
    # On a GPU those of rows lie there already when what is free is measured.
    gpu = resolve(config(**FEW), rows, replace(PLAIN, device="cuda", free_bytes=1 << 26))
    assert gpu.num_snapshots == (1 << 26) // 3 // (4 << 20)
    assert gpu.num_blocks == ((1 << 26) - gpu.num_snapshots * (4 << 20)) // block_bytes


def test_how_many_states_are_kept_can_be_said(spec: DecoderSpec) -> None:
    rows = with_states(spec)
    kept = resolve(config(state_cache_bytes=13 << 20, **FEW), rows, PLAIN)
    assert (kept.num_snapshots, kept.enable_prefix_cache) == (3, True)
    assert kept.num_blocks == (int(PLAIN.free_bytes * 0.2) - 20 * (4 << 20)) // (16 * spec.kv_bytes_per_token(4))
    # What is said of the cache is the blocks' alone.
    said = resolve(config(kv_cache_bytes=1 << 26, **FEW), rows, PLAIN)
    assert (said.num_snapshots, said.num_blocks) == (8, (1 << 26) // (16 * spec.kv_bytes_per_token(4)))
    for fields in ({"state_cache_bytes": 0}, {"enable_prefix_cache": False}):
        without = resolve(config(**fields, **FEW), rows, PLAIN)
        assert (without.num_snapshots, without.enable_prefix_cache) == (0, False)
    # Before a request of full length does not fit, none is kept.
    tight = replace(PLAIN, free_bytes=(17 * (4 << 20) + 4096 * 4096) * 5 + 5)
    assert resolve(config(**FEW), rows, tight).num_snapshots == 0
    # There is no use for more of them than some times as many as there are rows.
    assert resolve(config(**FEW), rows, replace(PLAIN, free_bytes=1 << 40)).num_snapshots == 16 * 17


def test_what_does_not_go_with_states_is_refused(spec: DecoderSpec) -> None:
    rows = with_states(spec)
    for fields, match in (
        ({"num_speculative_tokens": 4}, "num_speculative_tokens: 4, but this model has recurrent layers"),
        ({"kv_disk_bytes": 1 << 30}, "kv_disk_bytes: .*, but recurrent states"),
        ({"state_cache_bytes": -1}, "state_cache_bytes: -1 is less than 0"),
        (
            {"state_cache_bytes": 1 << 20},
            "state_cache_bytes: 1048576 bytes cannot hold one recurrent state of this model, 4194304",
        ),
        ({"state_cache_bytes": 1 << 24, "enable_prefix_cache": False}, "state_cache_bytes: .*enable_prefix_cache is"),
        ({"state_cache_bytes": 150 << 20}, r"Those that are kept take 155189248 \(state_cache_bytes\)"),
    ):
        with pytest.raises(ConfigError, match=match):
            resolve(config(**fields, **FEW), rows, PLAIN)
    with pytest.raises(ConfigError, match=r"The states of max_num_seqs 64 take 285212672 more"):
        resolve(config(dtype="float32"), rows, replace(PLAIN, free_bytes=1 << 29))
    with pytest.raises(ConfigError, match="state_cache_bytes: 1, but this model has no recurrent layers"):
        resolve(config(state_cache_bytes=1), spec, PLAIN)
