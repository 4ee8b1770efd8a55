"""Device-side search for the run of tokens that a program of a GPU kernel works on, without help from the host.

Each run is cut into tiles of `tile` tokens. Run i gets its tiles from number  first_i // tile + i  on, where first_i is
its first token: this increases with i and leaves room for every run's last, partial tile. So `num_tiles` programs
suffice, and each finds its run by bisection.
"""

import triton
import triton.language as tl


@triton.jit
def run_of(runs, STRIDE: tl.constexpr, count, tile, TILE: tl.constexpr):
    """Return the last of `count` runs whose first tile is at most `tile`.

    A run is a row of STRIDE int64 with its first token in column 0.
    """
    base = tl.load(runs)
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        first = (tl.load(runs + middle * STRIDE) - base) // TILE + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def place_of(runs, STRIDE: tl.constexpr, count, tile, TILE: tl.constexpr):
    """Return a program's run, that run's first token, and the index of the program's tile within the run."""
    run = run_of(runs, STRIDE, count, tile, TILE)
    first = tl.load(runs + run * STRIDE)
    return run, first, tile - ((first - tl.load(runs)) // TILE + run)


def num_tiles(num_tokens: int, num_runs: int, tile: int) -> int:
    """Return how many programs cover every tile of `num_runs` runs with `num_tokens` tokens in total."""
    return num_tokens // tile + num_runs
