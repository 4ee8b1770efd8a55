from __future__ import annotations

import pytest
import torch

from kernels.lora_pack.packing import Packing
from kernels.lora_pack.packing import lora_pack as pack_all
from kernels.lora_pack.reference import Form, lora_pack
from kernels.native import NativeKernels
from kernels.packed_linear.reference import to_panels
from tests.kernels.conftest import DTYPES

FILE_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def test_a_factor_and_gains_are_multiplied_in_before_the_number_is_rounded() -> None:
    matrix, gain = torch.randn(20, 3), torch.rand(20)
    found = lora_pack(matrix=matrix, form=Form.PANELS, dtype=torch.bfloat16, factor=0.3, gain=gain)
    assert torch.equal(found, to_panels((matrix * 0.3 * gain[:, None]).bfloat16()).flatten())
    assert torch.equal(lora_pack(matrix=matrix, form=Form.TRANSPOSED, dtype=torch.float32), matrix.T.flatten())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("file_dtype", FILE_DTYPES)
def test_the_kernel_is_the_reference_to_the_bit(
    kernels: NativeKernels, dtype: torch.dtype, file_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    packings = []
    for rows, columns in ((8, 48), (3, 17), (1, 1), (33, 5), (16, 2), (40, 8)):
        matrix = (torch.randn(rows, columns) * 10.0 ** torch.randint(-9, 4, (rows, columns))).to(file_dtype)
        packings += [Packing(matrix=matrix, form=form) for form in (Form.AS_IS, Form.TRANSPOSED)]
        packings.append(Packing(matrix=matrix, form=Form.PANELS, factor=0.7))
        packings.append(Packing(matrix=matrix, form=Form.PANELS, factor=2.0, gain=torch.rand(rows)))
    expected = [
        lora_pack(matrix=item.matrix, form=item.form, dtype=dtype, factor=item.factor, gain=item.gain)
        for item in packings
    ]
    packed = pack_all(packings, dtype, kernels)
    assert torch.equal(packed.flat, torch.cat(expected))
    starts = torch.tensor([0, *[len(item) for item in expected[:-1]]]).cumsum(0) * dtype.itemsize
    assert packed.addresses == [packed.flat.data_ptr() + int(start) for start in starts]


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("file_dtype", FILE_DTYPES)
def test_what_is_not_finite_stays_so(kernels: NativeKernels, file_dtype: torch.dtype, form: Form) -> None:
    matrix = torch.zeros(2, 4)
    matrix[0, 1:] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    for dtype in DTYPES:
        packed = pack_all([Packing(matrix=matrix.to(file_dtype), form=form)], dtype, kernels)
        expected = lora_pack(matrix=matrix.to(file_dtype), form=form, dtype=dtype)
        assert torch.equal(packed.flat.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_no_matrices_take_no_memory(kernels: NativeKernels) -> None:
    assert pack_all([], torch.float32, kernels).addresses == []
