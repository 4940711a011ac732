"""The main model within a `DeepSeekMTP`, as `generate` and `forward` call it: its own inputs, images among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...configuration.fields import field
from ...configuration.mtp_families import MTPFamily, family_of
from ...generation.backbone.wrapped_models import Kwargs, input_embeddings
from ..common.backbone_parts import final_norm


@dataclass
class MainOutput:
    """Output of a main model without its head."""

    outputs: Any  # those of its class
    inputs_embeds: Tensor  # [B, L, H] that its first layer read, features of images among them
    position_ids: Tensor | None  # as its first layer read them
    state: Tensor  # [B, L, H], h^0, which the first module reads: after `last_map`, or before it (`early`)


def run_main(
    main: PreTrainedModel,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    position_ids: Tensor | None,
    inputs: Kwargs,
) -> MainOutput:
    """Call a main model without its head, on ids [B, L] or embeddings [B, L, H]; `inputs` are pixels, for example."""
    decoder, body, config = main.get_decoder(), cast(nn.Module, main.base_model), main.config
    if not has_towers(config):
        body = decoder
        if inputs_embeds is None:
            inputs_embeds = cast(Tensor, input_embeddings(main)(input_ids))
            if field(config, "ple_layer_ids"):
                inputs = inputs | {"ple_input_ids": input_ids}
            if "hash_moe" not in (field(config, "mlp_layer_types") or ()):  # experts that are chosen by a token's id
                input_ids = None
    family, inputs_read = family_of(config), {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
    read = inputs_read | ({"inputs_embeds": None} if body is decoder and input_ids is not None else {})
    looked_at = _inputs_of(decoder) if has_towers(config) else nullcontext(inputs_read)
    with looked_at as seen, _inputs_of(last_map(decoder, family)) if family.early else nullcontext({}) as mapped:
        outputs = body(input_ids=input_ids, **read, **inputs)
    state = mapped["args"][0].flatten(2) if family.early else outputs.last_hidden_state  # [B, L, H or N H]
    return MainOutput(outputs, cast(Tensor, seen["inputs_embeds"]), seen.get("position_ids"), state)


def last_map(decoder: nn.Module, family: MTPFamily) -> nn.Module:
    """Return the module that reads the last layer's output: a norm, or a mixer of streams."""
    named = dict(decoder.named_children()) if family.streams else {}
    return named.get("hyper_connection_mixer") or named.get("hc_head") or final_norm(decoder)


def mapped_state(decoder: nn.Module, config: PreTrainedConfig, state: Tensor) -> Tensor:
    """Return the input of the unembedding, [B, L, H], from a state before `last_map`."""
    family, text = family_of(config), config.get_text_config()
    last, streams = last_map(decoder, family), field(text, "hc_mult") if family.streams else None
    return last(state) if streams is None else final_norm(decoder)(last(state.unflatten(-1, (streams, -1))))


@contextmanager
def _inputs_of(module: nn.Module) -> Iterator[Kwargs]:
    """Yield a dict that receives the arguments of a module's next call in this thread; positional ones as `args`."""
    seen: Kwargs = {}
    own = get_ident()

    def note(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None) -> None:
        if get_ident() == own and kwargs is not None:
            seen.update(kwargs, args=args)

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def has_towers(config: PreTrainedConfig) -> bool:
    """Return whether a model has towers of other modalities."""
    return config.get_text_config() is not config
