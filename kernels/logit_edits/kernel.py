"""GPU kernel that masks and penalizes some rows of logits in place, each number read and written once."""

import triton
import triton.language as tl


@triton.jit
def logit_edits_kernel(
    logits, edits, words, in_prompt, output_counts, vocab, num_words, PART: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (edit, part) edits a part of one row of `logits` [rows, vocab] float32.

    `edits` [n, 6] int64 are the rows of the logits, of the penalties' tables and of the masks, -1 for no penalties or
    no mask, and the bits of the repetition, frequency and presence penalties in float64. `words` [masks, num_words]
    int32 has a bit for each token, the lowest first, set if it is allowed. `in_prompt` (bool) and `output_counts`
    (int32) are [table rows, vocab].
    """
    edit, low = edits + tl.program_id(0) * 6, tl.program_id(1) * PART
    row, table, masked = tl.load(edit), tl.load(edit + 1), tl.load(edit + 2)
    repetition = tl.load(edit + 3).to(tl.float64, bitcast=True).to(tl.float32)
    frequency = tl.load(edit + 4).to(tl.float64, bitcast=True).to(tl.float32)
    presence = tl.load(edit + 5).to(tl.float64, bitcast=True).to(tl.float32)
    for start in range(low, tl.minimum(vocab, low + PART), BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_token = token < vocab
        value = tl.load(logits + row * vocab + token, mask=is_token, other=0.0)
        if masked >= 0:
            word = tl.load(words + masked * num_words + token // 32, mask=is_token, other=0)
            value -= tl.where((word >> (token % 32)) & 1 != 0, 0.0, float("inf"))
        if table >= 0:
            count = tl.load(output_counts + table * vocab + token, mask=is_token, other=0)
            is_prompt = tl.load(in_prompt + table * vocab + token, mask=is_token, other=0) != 0
            is_output = count > 0
            factor = tl.where(is_prompt | is_output, repetition, 1.0)
            value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
            value = value - count.to(tl.float32) * frequency - tl.where(is_output, presence, 0.0)
        tl.store(logits + row * vocab + token, value, mask=is_token)
