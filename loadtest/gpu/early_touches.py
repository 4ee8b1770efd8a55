"""Finds in compiled code what a kernel does too early: before it waits for the preceding kernel (`kernels.overlap`).

Triton may move a load across a wait. Its pipeliner starts to copy the operands of a product before the loop around it,
even those that are loaded behind a wait inside of the loop (Triton 3.6 and 3.7; https://github.com/triton-lang/triton
issue 11905). The source is right then, and so is what the interpreter computes.
"""

from __future__ import annotations

import re

WAIT = "griddepcontrol.wait"
_BRANCH = re.compile(r"(?P<condition>@!?%\w+\s+)?bra(\.uni)?\s+(?P<label>\S+);")
_END = re.compile(r"(ret|exit|trap);")
_TOUCH = re.compile(r"(@!?%\w+\s+)?(st|atom|red)\.(\w+\.)*?global\b|(@!?%\w+\s+)?cp\.async\.(c[ag]|bulk)\b")


def early_touch(ptx: str) -> str | None:
    """Return an instruction that writes memory or copies from it in the background on a path without a wait.

    Args:
        ptx: a module with one kernel.

    Returns:
        None if there is no such instruction, or the kernel waits nowhere.
    """
    if WAIT not in ptx:
        return None
    lines = [line.partition("//")[0].strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    place_by_label = {line.removesuffix(":"): place for place, line in enumerate(lines) if line.endswith(":")}
    reached: set[int] = set()
    begun = [0]
    while begun:
        place = begun.pop()
        while place < len(lines) and place not in reached:
            reached.add(place)
            line = lines[place]
            if line.startswith(WAIT) or _END.match(line):
                break
            if _TOUCH.match(line):
                return line
            branch = _BRANCH.match(line)
            if branch is not None:
                begun.append(place_by_label[branch["label"]])
                if not branch["condition"]:
                    break
            place += 1
    return None
