"""Gives the modules of a transformers model to a backend, which lays out their weights and computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from adapters.experts import EXPERTS
from adapters.tensor_names import parse_module_name
from adapters.weights import FUSED_GROUPS
from engine.backend import Backend, Product, RoutedExperts
from engine.fallback.plain_parts import OUTPUT, GatedMlp, RmsNorm, gated_mlp_of, norm_of
from engine.fallback.spec import UNCALLED
from engine.lora import LinearProducts, LoraProducts
from kernels.gated_activation.reference import Activation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.fallback.spec import FallbackSpec


class ModuleLayout:
    """Computes linear modules, gated MLPs, experts, RMS norms and the vocabulary of a model, with adapters.

    Args:
        backend: computes them, and lays out their weights.
        dtype: of weights and hidden states; modules of another dtype are left to transformers.

    Attributes:
        lora: of the tokens that linear modules are called on; None for no adapters.
    """

    def __init__(self, spec: FallbackSpec, backend: Backend, dtype: torch.dtype) -> None:
        self.lora: LinearProducts | None = None
        self._expert_lora: LoraProducts | None = None
        self._decodes: torch.Tensor | None = None
        self._spec = spec
        self._backend = backend
        self._dtype = dtype

    def take_over(self, model: PreTrainedModel, device: torch.device) -> None:
        """Take over the modules, and move them to the device one by one.

        So of quantized weights no more than one is there at a time as it was loaded.
        """
        # Needs transformers, which takes seconds to import.
        from engine.fallback.experts import activation_of

        head = model.get_output_embeddings()
        adapted = set(self._spec.linear_shapes())
        taken: set[torch.nn.Module] = {head}
        for name, module in model.named_modules():
            if module in taken:
                continue
            # A router may be float32 in a 16-bit model, and then so is its input.
            if type(module) is torch.nn.Linear and module.weight.dtype == self._dtype and not name.endswith(UNCALLED):
                self._take_linear(name, module, device)
                adapted.discard(name)
            elif (mlp := gated_mlp_of(module, self._dtype)) is not None:
                self._take_mlp(name, module, mlp, device)
                taken.update(module.children())
                adapted.difference_update(f"{name}.{part}" for part in (*mlp.inputs, OUTPUT))
            elif (norm := norm_of(module, self._dtype)) is not None:
                self._take_norm(module, norm, device)
            elif (activation := activation_of(module)) is not None and module.down_proj.dtype == self._dtype:
                self._take_experts(name, module, activation, device)
        assert not adapted, f"adapters of {min(adapted)} would have no effect"
        if type(head) is torch.nn.Linear:
            self._take_vocabulary(model.get_input_embeddings(), head, device)
        for tensor in chain(model.parameters(), model.buffers()):
            tensor.data = _own(tensor, device)

    def begin(self, lora: LoraProducts | None, decodes: torch.Tensor) -> None:
        """Begin a step with these adapters; `decodes` as `engine.backend.RoutedExperts` takes them."""
        self.lora = self._expert_lora = lora
        self._decodes = decodes

    def end(self) -> None:
        """End the step."""
        self.lora = self._expert_lora = self._decodes = None

    def _take_linear(self, name: str, module: torch.nn.Linear, device: torch.device) -> None:
        product = self._adapted([name], [module], self._product(name, [module], device))
        module.forward = partial(_by_rows, product)  # type: ignore[method-assign]

    def _take_mlp(self, name: str, module: torch.nn.Module, mlp: GatedMlp, device: torch.device) -> None:
        names = [f"{name}.{part}" for part in mlp.inputs]
        inputs, output = [module.get_submodule(part) for part in mlp.inputs], module.get_submodule(OUTPUT)
        # By this name a backend knows that its kernel may combine the halves.
        plain = self._product("gate_up", inputs, device)
        adapted = self._adapted(names, inputs, plain)
        last = f"{name}.{OUTPUT}"
        down = self._adapted([last], [output], self._product(last, [output], device))

        def multiply(x: torch.Tensor) -> torch.Tensor:
            if self.lora is None:
                return down(self._backend.normed(plain, x, None, None, 0.0, mlp.activation))
            return down(self._backend.activate_and_multiply(adapted(x), mlp.activation))

        module.forward = partial(_by_rows, multiply)

    def _product(self, called: str, modules: Sequence[torch.nn.Module], device: torch.device) -> Product:
        """Return the product of an input with the weights of linear modules, side by side, and free those."""
        weight, bias = (_joined([getattr(module, part) for module in modules], device) for part in ("weight", "bias"))
        assert weight is not None
        for module in modules:
            _give_away(module)
        return self._backend.linear(called, weight, bias)

    def _adapted(self, names: Sequence[str], modules: Sequence[torch.nn.Module], product: Product) -> Product:
        """Return a product that also applies the step's adapters, if the modules take any."""
        places = [place for name in names if (place := parse_module_name(name)) is not None]
        if not places or names[0] not in self._spec.modules:
            return product
        layer, projections = places[0][0], tuple(projection for _, projection in places)
        splits: Mapping[str, int] = {name: _width(module) for name, module in zip(projections, modules, strict=True)}
        if len(names) == 1:
            splits = self._spec.widths().get(projections[0], splits)
        multiply = self._multiply if len(names) == 1 or projections in FUSED_GROUPS else self._multiply_apart
        return partial(multiply, product, layer, tuple(splits), tuple(splits.values()))

    def _multiply(
        self, product: Product, layer: int, modules: Sequence[str], splits: Sequence[int], x: torch.Tensor
    ) -> torch.Tensor:
        return product(x) if self.lora is None else self.lora.multiply(product, x, layer, modules, splits)

    def _multiply_apart(
        self, product: Product, layer: int, modules: Sequence[str], splits: Sequence[int], x: torch.Tensor
    ) -> torch.Tensor:
        """Multiply by modules that share a product, but whose adapters cannot be applied together."""
        y, lora = product(x), self.lora
        if lora is None:
            return y
        parts = [part.contiguous() for part in y.split(list(splits), dim=1)]
        return torch.cat(
            [
                lora.multiply(partial(_answer, part), x, layer, (module,), (width,))
                for module, part, width in zip(modules, parts, splits, strict=True)
            ],
            dim=1,
        )

    def _take_norm(self, module: torch.nn.Module, norm: RmsNorm, device: torch.device) -> None:
        theirs: Product = module.forward
        weight, eps = _own(norm.weight, device), norm.eps

        def normed(x: torch.Tensor) -> torch.Tensor:
            if x.dtype is not self._dtype:
                return theirs(x)
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return self._backend.add_rms_norm(rows, None, weight, eps).view(x.shape)

        module.forward = normed

    def _take_experts(self, name: str, module: torch.nn.Module, activation: Activation, device: torch.device) -> None:
        gate_up, down = (_own(module.get_parameter(part), device) for part in ("gate_up_proj", "down_proj"))
        at = EXPERTS.fullmatch(name) if name in self._spec.expert_modules else None
        product = self._backend.routed_experts(gate_up, down, activation)
        module.forward = partial(self._by_experts, product, None if at is None else int(at["layer"]))
        for part in ("gate_up_proj", "down_proj"):
            _give_away(module, part)

    def _by_experts(
        self,
        product: RoutedExperts,
        layer: int | None,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Call a layer's experts by transformers' interface: [tokens, hidden], and what the router chose."""
        if layer is None:
            return product(x.contiguous(), experts, weights, self._decodes)
        return product(x.contiguous(), experts, weights, self._decodes, self._expert_lora, layer)

    def _take_vocabulary(self, embedding: torch.nn.Module, head: torch.nn.Linear, device: torch.device) -> None:
        """Lay out the output matrix and the embedding, once if they are tied."""
        weight = embedding.get_parameter("weight")
        # If the files hold two matrices, transformers leaves them untied, whatever config.json says.
        matrix = None if head.weight is weight else _own(head.weight, device)
        embed, to_logits = self._backend.vocabulary(_own(weight, device), matrix)
        bias = None if head.bias is None else _own(head.bias, device)
        product = to_logits if bias is None else lambda h: to_logits(h).add_(bias)
        head.forward = partial(_by_rows, product)  # type: ignore[method-assign]
        _give_away(head)
        if type(embedding) is torch.nn.Embedding:
            embedding.forward = partial(_by_ids, embed)  # type: ignore[method-assign]
            _give_away(embedding)


def _answer(result: torch.Tensor, _x: torch.Tensor) -> torch.Tensor:
    return result


def _width(module: torch.nn.Module) -> int:
    assert isinstance(module, torch.nn.Linear)
    return module.out_features


def _own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor's data in its own memory on the device: transformers leaves it mapped from the file."""
    return tensor.data.to(device, copy=True)


def _joined(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    """Return tensors side by side on the device, in memory of their own; None if there are none."""
    found = [tensor.data for tensor in tensors if tensor is not None]
    if len(found) < 2:
        return _own(found[0], device) if found else None
    return torch.cat(found).to(device)


def _give_away(module: torch.nn.Module, name: str = "weight") -> None:
    """Free a weight that the backend has laid out; an empty one stays, because some modules ask for its dtype."""
    setattr(module, name, torch.nn.Parameter(module.get_parameter(name).data.new_empty(0), requires_grad=False))


def _by_rows(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply a product that takes contiguous [rows, in] to [any, ..., in]."""
    y = product(x.flatten(0, -2).contiguous())
    return y.view(*x.shape[:-1], y.shape[-1])


def _by_ids(embed: Callable[[torch.Tensor], torch.Tensor], token_ids: torch.Tensor) -> torch.Tensor:
    """Apply an embedding that takes [tokens] to [any, ...]."""
    return embed(token_ids.flatten()).view(*token_ids.shape, -1)
