"""Dequantizes MXFP4 weights, laid out by `kernels.mxfp4.reference`, on their way into a tiled product."""

import triton
import triton.language as tl


@triton.jit
def pair_of(words, PAIR: tl.constexpr):
    """Return pair PAIR of each word, as the bits of two bfloat16 that are too small by a factor of 2^(exponent - 1)."""
    if PAIR < 3:
        # Masks sign, exponent and mantissa of both halves.
        return (words << 3 * PAIR) & -0x7E3F7E40
    return ((words >> 6) & 0x01800180) | ((words >> 4) & 0x00400040) | ((words << 4) & -0x7FFF8000)


@triton.jit
def weights_of(pair, unit, dtype: tl.constexpr):
    """Return the weights of pairs in `dtype`: those of even inputs and those of odd ones."""
    if dtype == tl.bfloat16:
        scale = (unit << 7).to(tl.int16).to(dtype, bitcast=True)
        # In this order both products are one instruction; in the other one, halves are swapped before and after it.
        odd = (pair >> 16).to(tl.int16).to(dtype, bitcast=True) * scale
        even = pair.to(tl.int16).to(dtype, bitcast=True) * scale
    else:
        even, odd = wide_weights_of(pair, unit)
        even, odd = even.to(dtype), odd.to(dtype)
    return even, odd


@triton.jit
def wide_weights_of(pair, unit):
    """Return the weights of pairs as `weights_of` does, in float32."""
    scale = (unit << 23).to(tl.float32, bitcast=True)
    odd = (pair & -0x10000).to(tl.float32, bitcast=True) * scale
    even = (pair << 16).to(tl.float32, bitcast=True) * scale
    return even, odd


@triton.jit
def _bytes_of(words):
    """Return the four bytes of each word [lines] as [lines, 4].

    Uses joins, through which the compiler can trace the product's register layout back to the load; it cannot through a
    shift by an index.
    """
    first = tl.join(words & 255, (words >> 8) & 255)
    second = tl.join((words >> 16) & 255, (words >> 24) & 255)
    return tl.join(first, second).permute(0, 2, 1).reshape([words.shape[0], 4])


@triton.jit
def add_mxfp4(product, x, row, held, units, line, depth, at, SUMS_APART: tl.constexpr):
    """Add the product of 128 inputs from `at` on to `product` [lines, rows]; all lines and rows exist.

    The last block may have fewer inputs. `held` is in 32-bit words; 32 divides `depth`. If SUMS_APART, these inputs are
    summed first: on a Hopper GPU, their products then follow one another, where each would wait for the one before.
    """
    groups, first = depth // 32, at // 32
    word, place = tl.arange(0, 16), tl.arange(0, 32)
    is_word = (first + word // 4 < groups)[None, :]
    start = line.to(tl.int64)
    words = tl.load(held + (start[:, None] * groups + first) * 4 + word[None, :], mask=is_word, other=0)
    few = _bytes_of(tl.load(units + start * tl.cdiv(groups, 4) + first // 4))
    unit = tl.broadcast_to(few[:, :, None], [line.shape[0], 4, 4]).reshape([line.shape[0], 16])
    inputs = row.to(tl.int64)[:, None] * depth
    part = tl.zeros(product.shape, tl.float32) if SUMS_APART else product
    for PAIR in tl.static_range(4):
        even, odd = weights_of(pair_of(words, PAIR), unit, x.dtype.element_ty)
        k = at + place // 8 * 32 + 8 * PAIR + place % 8
        x_tile = tl.load(x + inputs + k[None, :], mask=(k < depth)[None, :], other=0.0)
        part = tl.dot(tl.interleave(even, odd), tl.trans(x_tile), part, input_precision="ieee")
    return product + part if SUMS_APART else part
