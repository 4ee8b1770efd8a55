"""What compiled code does on a path on which it has not waited for the preceding kernel."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

from loadtest.gpu.early_touches import early_touch
from tests.interpreter.uninterpreted import run_uninterpreted

HEAD = ".visible .entry kernel(\n\t.param .u64 kernel_param_0\n)\n{\n\tgriddepcontrol.launch_dependents; // dummy %r1\n"
WAIT = "\tgriddepcontrol.wait; // dummy %r2\n"
READ, WRITE = "\tld.global.b32 %r3, [ %rd1 + 0 ];\n", "\t@%p1 st.global.b32 [ %rd1 + 0 ], { %r3 };\n"
COUNT = "\t@%p1 atom.global.gpu.acq_rel.add.u32 %r4, [ %rd2 + 0 ], 0x1;\n"
COPY = "\tcp.async.cg.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x10, 0x10;\n"
SHARED = "\tst.shared.b32 [%r6], %r3;\n\tcp.async.commit_group;\n\tcp.async.wait_group 0x0;\n"
# A program without work ends, or waits and ends, in a block before the one that the others go to.
LEAVE = "\t@%p2 bra $L__BB0_2;\n// %bb.1:\n"
REST = "\tret;\n$L__BB0_2:\t// the rest\n"
LOOP = "$L__BB0_3:\n"
AGAIN = "\t@%p3 bra $L__BB0_3;\n"
END = "\tret;\n}\n"


@pytest.mark.parametrize(
    "body",
    [
        READ + SHARED + WAIT + READ + COPY + WRITE + COUNT,
        LEAVE + WAIT + REST + READ + WAIT + COPY + LOOP + WAIT + COPY + AGAIN + WRITE,
        LEAVE + REST + READ + WAIT + WRITE,
        "\tbra.uni $L__BB0_2;\n" + WRITE + REST + WAIT + WRITE,
    ],
    ids=["straight", "a loop", "without work", "what is never reached"],
)
def test_what_waits_first_may_do_anything(body: str) -> None:
    assert early_touch(HEAD + body + END) is None


@pytest.mark.parametrize(
    ("body", "touch"),
    [
        (READ + WRITE + WAIT, WRITE),
        (COUNT + WAIT, COUNT),
        (COPY + WAIT, COPY),
        # What a compiler makes of loads behind a wait in a loop.
        (LEAVE + WAIT + REST + COPY + LOOP + WAIT + COPY + AGAIN + WRITE, COPY),
        ("\t@%p2 bra $L__BB0_2;\n" + WAIT + "$L__BB0_2:\n" + WRITE, WRITE),
    ],
    ids=["a write", "a count", "a copy", "a copy before a loop", "a path around the wait"],
)
def test_what_comes_before_is_told(body: str, touch: str) -> None:
    assert early_touch(HEAD + body + END) == touch.strip()


def test_a_kernel_that_does_not_overlap_has_nothing_to_wait_for() -> None:
    assert early_touch(HEAD + WRITE + COPY + END) is None


EXPAND = """
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from loadtest.gpu import launches
from kernels.architecture import pretending
from loadtest.gpu.early_touches import early_touch
from kernels.recording import recording
from kernels.triton_cache import compile_launch

with pretending("sm_90"), recording() as found:
    launches.rehearse(launches.QWEN_3)
launch = next(launch for launch in found if launch.kernel == "lora_expand_kernel")
staged = replace(launch, options=tuple({**dict(launch.options), "num_stages": 2}.items()))
for one in (launch, staged):
    print(early_touch(compile_launch(one, GPUTarget("cuda", 90, 32)).asm["ptx"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_loop_that_waits_is_compiled_without_stages() -> None:
    """With two, compilers copy operands before the loop; should a later one not, more stages would do no harm."""
    as_it_is, staged = run_uninterpreted("-c", EXPAND).splitlines()
    assert as_it_is == "None"
    if Version(version("triton")) < Version("3.8"):
        assert staged.startswith("cp.async")
