"""Where an activated adapter starts in a prompt. Pure: standard library only.

Source: Greenewald et al., "Activated LoRA" (arXiv 2504.12397), and huggingface/peft 0.21, `calculate_alora_offsets`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def activation_start(prompt_ids: Sequence[int], invocation_ids: Sequence[int]) -> int | None:
    """Return the position of the last occurrence of the invocation tokens in a prompt; None if there is none.

    All tokens from there on are those of the adapter, the ones before it of the base model. Without invocation tokens,
    as of other adapters, that is the whole prompt.
    """
    if not invocation_ids:
        return 0
    prompt, invocation = array("I", prompt_ids).tobytes(), array("I", invocation_ids).tobytes()
    width = array("I").itemsize
    at = prompt.rfind(invocation)
    while at > 0 and at % width:  # inside of a token
        at = prompt.rfind(invocation, 0, at + len(invocation) - 1)
    return None if at < 0 else at // width
