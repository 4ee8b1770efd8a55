"""Parses a checkpoint's config.json into a `DecoderSpec`. Reads no weights and runs no code from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.decoder.ends import eos_ids
from engine.decoder.experts import parse_experts
from engine.decoder.families import ACTIVATIONS, DECODER_BY_BASE, FAMILIES, PLAIN_NAMES, Activation, Family
from engine.decoder.fields import Fields
from engine.decoder.json_file import read_json
from engine.decoder.layer_forms import LayerForm, layer_forms
from engine.decoder.scales import parse_scales
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored import stored_of
from engine.decoder.wrapped import decoder_fields
from engine.errors import CheckpointError

_LLAMA = "LlamaForCausalLM"
_SAVED_AS_LLAMA = ("exaone", "internlm3", "iquestcoder")
"""Model types, published with code, that transformers computes with its Llama, whose name it saves them under."""
_NAMED_OTHERWISE = ("exaone",)
"""Those whose tensors keep the names that they were published with, which transformers knows."""


class UnknownArchitectureError(CheckpointError):
    """The architecture is not in `FAMILIES`; `fields` holds the checkpoint's config.json."""

    def __init__(self, fields: Fields, architecture: str) -> None:
        super().__init__(f"{fields.where}: architectures is {[architecture]!r}; one of {', '.join(FAMILIES)} is known.")
        self.fields = fields
        self.architecture = architecture


def read_spec(model_path: str) -> DecoderSpec:
    """Read config.json of a folder in Hugging Face layout, and other files for the EOS token ids.

    Raises:
        UnknownArchitectureError: the architecture is not in `FAMILIES`, or the tensors have names of their own.
        CheckpointError: a file is missing or broken, or a field is missing or wrong.
    """
    folder = Path(model_path)
    fields = _fields(folder)
    where = fields.where
    names = fields.config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str):
        raise CheckpointError(f"{where}: architectures is {names!r}; it must hold exactly one name.")
    is_base = name in DECODER_BY_BASE
    name = DECODER_BY_BASE.get(name, name)
    if name not in FAMILIES or fields.config.get("model_type") in _NAMED_OTHERWISE:
        raise UnknownArchitectureError(fields, name)
    family = FAMILIES[name]
    _check_served(fields, family)
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    head_dim = fields.count("head_dim", hidden // heads)
    kv_heads = fields.count("num_key_value_heads", heads)
    _check_heads(heads, kv_heads, head_dim, where)
    scales = parse_scales(fields, family, hidden)
    layers = layer_forms(fields, family, scales, num_layers=fields.count("num_hidden_layers"), head_dim=head_dim)
    spec = DecoderSpec(
        architecture=name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=fields.positive("rms_norm_eps", family.eps),
        layers=layers,
        qkv_bias=fields.switch(family.qkv_bias),
        o_bias=fields.switch(family.o_bias),
        mlp_bias=fields.switch(family.mlp_bias),
        has_sinks=family.has_sinks,
        has_qk_norm=family.has_qk_norm,
        norms_heads_together=family.norms_heads_together,
        is_fused=family.is_fused,
        norms=family.norms,
        activation=_activation(fields, family),
        scales=scales,
        is_tied=is_base or fields.switch("tie_word_embeddings", default=family.is_tied),
        max_position=_max_position(fields, layers),
        eos_ids=eos_ids(folder, fields.config, fields.count("vocab_size")),
        stored=stored_of(folder, fields.config, where),
        generates=not is_base,
        experts=None if family.mixture is None else parse_experts(fields, family.mixture),
        expert_names=PLAIN_NAMES if family.mixture is None else family.mixture.names,
    )
    if spec.stored is not None:
        spec.stored.check_sizes(spec.stored_shapes(), where)
    return spec


def _fields(folder: Path) -> Fields:
    """Return the decoder's fields of config.json; a checkpoint that requires its own code is refused."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder.")
    config, where = read_json(folder / "config.json"), f"{folder}/config.json"
    if "auto_map" in config and not _is_known_by_now(config):
        raise CheckpointError(f"{where}: it requires custom code (auto_map), which is never executed.")
    return decoder_fields(config, where)


def _is_known_by_now(config: Mapping[str, object]) -> bool:
    """Tell whether a checkpoint's bundled code defines an architecture that is by now standard under the same name.

    Bundled code of most families changes the model; some makes attention bidirectional. Saved again by transformers, a
    checkpoint has the architecture of the standard one, and still names the code.
    """
    names, code, kind = config.get("architectures"), config.get("auto_map"), config.get("model_type")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(code, Mapping)):
        return False
    name = str(names[0])
    family = FAMILIES.get(name)
    classes = {str(value).rpartition(".")[2] for value in code.values()}
    is_of_type = f"{str(kind).replace('_', '')}forcausallm" in {each.lower() for each in classes}
    if name == _LLAMA and kind in _SAVED_AS_LLAMA:
        return is_of_type
    return is_of_type or name in classes if family is None else name in classes and family.came_with_code


def _check_served(fields: Fields, family: Family) -> None:
    for name, value in family.unserved.items():
        if fields.config.get(name, value) != value:
            raise CheckpointError(f"{fields.where}: {name} is {fields.config[name]!r}; only {value!r} is supported.")
    for name, served in (("is_causal", True), ("use_bidirectional_attention", False)):
        if fields.switch(name, default=served) is not served:
            raise CheckpointError(
                f"{fields.where}: {name} must be {str(served).lower()}: only causal attention is supported."
            )


def _check_heads(heads: int, kv_heads: int, head_dim: int, where: str) -> None:
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads, {heads}, must be a multiple of num_key_value_heads, {kv_heads}."
        )
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim, {head_dim}, must be even.")


def _activation(fields: Fields, family: Family) -> Activation:
    if family.clamps:
        return "clamped"
    name = fields.config.get("hidden_activation") or fields.config.get("hidden_act") or family.activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise CheckpointError(f"{fields.where}: hidden_act {name!r} is not supported; known are {known}.")
    return ACTIVATIONS[name]


def _max_position(fields: Fields, layers: Iterable[LayerForm]) -> int:
    """Return the context length: what the checkpoint was made for, cut to where attention and angles are plain."""
    ropes = [layer.rope for layer in layers]
    longest = max(fields.count("max_position_embeddings"), *(rope.max_len for rope in ropes))
    longest = min([longest, *(rope.bound for rope in ropes if rope.bound is not None)])
    if (chunks := fields.config.get("dual_chunk_attention_config")) is not None:
        # Attention is plain only within the first chunk.
        within = Fields(chunks if isinstance(chunks, Mapping) else {}, f"{fields.where}: dual_chunk_attention_config")
        longest = min(longest, max(1, within.count("chunk_size") - within.count("local_size")))
    return longest
