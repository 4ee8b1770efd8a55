"""Torch's operators on the simulated GPU: computed on the host, by the rules of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tests.simulated_gpu.tensors import DEVICE, HOST, Access, Gpu, SimulatedTensor, poison

aten = torch.ops.aten

KEPT = {"aten::linear", "aten::matmul"}
"""Composite operators that are computed as a whole."""
LOOKS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2}
"""Operators that return numbers to the host, or a tensor whose size depends on numbers."""
COPIES = {aten.copy_, aten._to_copy}
INDEXED = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}
EMPTY = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    found = (a.float() * scale_a) @ (b.float() * scale_b)
    return (found if bias is None else found + bias).to(out_dtype)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return aten._softmax(x.float() if half_to_float else x, dim, False)


def _mm(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    found = torch.mm(a, b) if out_dtype is None else torch.mm(a.to(out_dtype), b.to(out_dtype))
    return found if out is None else out.copy_(found)


ON_A_HOST = {aten._scaled_mm: _scaled_mm, aten._softmax: _softmax, aten.mm: _mm}
"""What takes the place of operators that a CPU has not, or not all of, or in later versions of torch only."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What torch tells of an operator.

    Attributes:
        is_composite: it is made of others.
        is_view: its results are views of its arguments.
        written: position and name of the arguments that it writes.
        returned: for each result, whether it is such an argument.
    """

    is_composite: bool
    is_view: bool
    written: tuple[tuple[int, str], ...]
    returned: tuple[bool, ...]


@cache
def kind_of(func: Any) -> Kind:
    """Look at an operator's schema."""
    schema = func._schema
    has_whole = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    aliases = [result.alias_info for result in schema.returns]
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return Kind(
        is_composite=has_whole and schema.name not in KEPT,
        is_view=bool(aliases) and not written and all(alias is not None for alias in aliases),
        written=written,
        returned=tuple(alias is not None and alias.is_write for alias in aliases),
    )


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator some of whose arguments are simulated.

    Raises:
        RuntimeError: as torch does, if arguments lie on different devices, or the host waits where it must not.
    """
    kind = kind_of(func)
    if kind.is_composite:
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
    operation = _Operation(func, kind, args, kwargs)
    return operation.view() if kind.is_view else operation.run()


class _Operation:
    def __init__(self, func: Any, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func = func
        self._kind = kind
        self._packet = func.overloadpacket
        self._args = args
        self._kwargs = kwargs
        self._tensors = [*_tensors_of((*args, *kwargs.values()))]
        self._held = [tensor for tensor in self._tensors if isinstance(tensor, SimulatedTensor)]
        self._gpu: Gpu = self._held[0].hold.gpu

    def view(self) -> Any:
        """Return views."""
        args, kwargs = self._on_the_host()
        out = self._func(*args, **kwargs)
        hold = self._held[0].hold
        return SimulatedTensor(out, hold) if isinstance(out, torch.Tensor) else [SimulatedTensor(x, hold) for x in out]

    def run(self) -> Any:
        """Check the call, compute it on the host, and note what it has accessed."""
        has_device = any(not tensor.is_on_host for tensor in self._held)
        written = [tensor for tensor in map(self._argument, self._kind.written) if isinstance(tensor, torch.Tensor)]
        is_device = self._target(has_device=has_device).type == "cuda"
        if self._packet in COPIES and (has_device or is_device):
            self._check_copy(written, is_device=is_device)
        elif has_device:
            self._check_places()
        args, kwargs = self._on_the_host()
        out = ON_A_HOST.get(self._packet, self._func)(*args, **kwargs)
        if not (has_device or is_device):
            for tensor in self._held:
                is_write = any(tensor is value for value in written)
                self._gpu.order.access_by_host(tensor.hold.block, tensor.grains(), is_write=is_write)
        made = self._made(out, written, is_device=is_device)
        if (has_device or is_device) and self._packet not in LOOKS:
            accesses = [*self._accesses(made, written)]
            self._gpu.note_operator(accesses)
            if self._gpu.recording is not None:
                again = _Replayed(self._gpu, self._func, (args, kwargs), None if written else out, accesses)
                self._gpu.recording.operations.append((self._gpu.order.current, again))
        return made

    def _argument(self, place: tuple[int, str]) -> Any:
        position, name = place
        return self._args[position] if position < len(self._args) else self._kwargs.get(name)

    def _on_the_host(self) -> tuple[Any, Any]:
        """Return the arguments for the host's numbers."""
        return _plain(self._args), {name: _plain(value) for name, value in self._kwargs.items()}

    def _target(self, *, has_device: bool) -> torch.device:
        """Return the device of the result."""
        asked = self._kwargs.get("device")
        if asked is not None:
            return torch.device(asked)
        if self._packet is aten.copy_:
            target: torch.device = self._args[0].device
            return target
        return DEVICE if has_device else HOST

    def _check_copy(self, written: list[torch.Tensor], *, is_device: bool) -> None:
        """Check a copy: it is waited for, unless the host's side is page-locked and nobody asked to wait."""
        is_into = self._packet is aten.copy_
        is_async = bool(self._kwargs.get("non_blocking") or (is_into and (*self._args, False)[2]))
        on_host = [side for side in (self._args[1 if is_into else 0], *written) if side.device.type == "cpu"]
        if not is_device and not written:
            self._gpu.wait("a copy to the host")
        elif on_host and not (is_async and all(isinstance(side, SimulatedTensor) for side in on_host)):
            self._gpu.wait("a copy between host and device")

    def _check_places(self) -> None:
        """Check that an operator finds its numbers on the device."""
        if self._packet in LOOKS:
            self._gpu.wait(str(self._func))
        is_indexed = self._packet in INDEXED
        for tensor in self._tensors:
            if tensor.device.type == "cuda":
                if is_indexed and tensor.dtype is torch.bool and tensor is not self._args[0]:
                    self._gpu.wait("an index by a mask")
            elif is_indexed:
                self._gpu.wait("an index from the host")
            elif tensor.dim():
                raise RuntimeError(f"Expected all tensors to be on the same device: {self._func}")

    def _made(self, out: Any, written: list[torch.Tensor], *, is_device: bool) -> Any:
        """Return the results as tensors of where they lie."""
        returned = iter(written)

        def wrap(value: Any, is_written: bool) -> Any:
            if is_written:
                return next(returned)
            if not (isinstance(value, torch.Tensor) and is_device):
                return value
            for held in self._held:
                # Some return their argument where there is nothing to do.
                if value.untyped_storage()._cdata == held.elem.untyped_storage()._cdata:
                    return SimulatedTensor(value, held.hold)
            if self._packet in EMPTY:
                poison(value, is_recorded=self._gpu.recording is not None)
            return SimulatedTensor.allocated(self._gpu, value)

        if not isinstance(out, tuple | list):
            return wrap(out, bool(self._kind.returned) and self._kind.returned[0])
        returns = self._kind.returned if len(self._kind.returned) == len(out) else (False,) * len(out)
        return [wrap(value, is_written) for value, is_written in zip(out, returns, strict=True)]

    def _accesses(self, made: Any, written: list[torch.Tensor]) -> Iterator[Access]:
        """Yield what the operator reads and writes."""
        if self._packet in EMPTY:
            return
        for tensor in self._held:
            if not any(tensor is value for value in written):
                yield Access(tensor.hold.block, tensor.grains(), is_write=False)
        for tensor in written or [*_tensors_of([made])]:
            if isinstance(tensor, SimulatedTensor):
                yield Access(tensor.hold.block, tensor.grains(), is_write=True)


class _Replayed:
    """An operator of a recording: computed again from the same memory into the same memory."""

    def __init__(self, gpu: Gpu, func: Any, arguments: Any, out: Any, accesses: list[Access]) -> None:
        self._gpu = gpu
        self._func = func
        self._args, self._kwargs = arguments
        self._out = out
        self._accesses = accesses

    @torch.inference_mode()
    def __call__(self) -> None:
        """Compute again; a graph does not ask in which mode it was recorded."""
        self._gpu.note_operator(self._accesses)
        again = ON_A_HOST.get(self._func.overloadpacket, self._func)(*self._args, **self._kwargs)
        for old, new in zip(_tensors_of([self._out]), _tensors_of([again]), strict=False):
            if self._func.overloadpacket in EMPTY:
                poison(old)
            else:
                old.copy_(new)


def _tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_of(value)


def _plain(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value.elem
    if isinstance(value, torch.device):
        return HOST
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value
