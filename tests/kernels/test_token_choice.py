from __future__ import annotations

import pytest
import torch

from kernels.token_choice.reference import DrawKeys, gumbel_noise, gumbel_noise_of_all, philox_4x32, race


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).unsqueeze(1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (column(word) for word in counter)
    words = philox_4x32((c0, c1, c2, c3), column(key[0]), column(key[1]))
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 257])
def test_noise_of_chosen_tokens_is_that_of_all_tokens(vocab_size: int) -> None:
    keys = DrawKeys(seed_low=column(1, 2, 3), seed_high=column(0, 9, 0xFFFFFFFF), position=column(5, 5, 0xFFFFFFFF))
    whole = gumbel_noise_of_all(keys, vocab_size)
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)).expand(3, -1)
    assert torch.equal(gumbel_noise(keys, order), whole.gather(1, order))
    assert whole.isfinite().all()


def test_noise_has_the_moments_of_a_gumbel_variable() -> None:
    keys = DrawKeys(seed_low=column(7), seed_high=column(0), position=column(0))
    noise = gumbel_noise_of_all(keys, 200_000).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.03)


def test_a_masked_token_never_wins_the_race() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert race(scores, torch.tensor([[22.0, -3.0, 22.0]])).tolist() == [1]
