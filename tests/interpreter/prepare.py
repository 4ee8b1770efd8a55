"""Triton's interpreter as the tests need it: faster, and right where it is wrong."""

from __future__ import annotations


def prepare() -> None:
    """Change the interpreter, in a process that is to interpret kernels and has not met any."""
    # Imported here: they import Triton, which looks at its environment as it is imported.
    from tests.interpreter import floats, operands, quick, scalars, types

    types.quicken()
    operands.quicken()
    scalars.mend()
    quick.quicken()
    floats.mend()
