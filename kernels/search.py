"""Which of several runs of tokens a program of a GPU kernel works on, found without the host's help.

Runs are tiled by `tile` tokens each; with the first token of run i, its first tile is  first_i // tile + i  at the
earliest, which grows with i and leaves room for every run's last, partial tile. So `num_tiles` programs are enough, and
each finds its run by bisection.
"""

import triton
import triton.language as tl


@triton.jit
def run_of(runs, STRIDE: tl.constexpr, count, tile, TILE: tl.constexpr):
    """Return the last of `count` runs (first token in column 0 of rows of STRIDE int64) that begins by `tile`."""
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
    """Return which run a program works on, that run's first token, and the number of the program's tile in it."""
    run = run_of(runs, STRIDE, count, tile, TILE)
    first = tl.load(runs + run * STRIDE)
    return run, first, tile - ((first - tl.load(runs)) // TILE + run)


def num_tiles(num_tokens: int, num_runs: int, tile: int) -> int:
    """Return how many programs reach every tile of `num_runs` runs that have `num_tokens` tokens together."""
    return num_tokens // tile + num_runs
