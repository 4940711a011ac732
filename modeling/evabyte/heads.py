"""EvaByte's heads: the own head and draft heads, one matrix `lm_head.weight` in checkpoints; and MtPC's draft LoRA.

The draft LoRA runs the last k layers once more, with adapters and a separate cache, below a head that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from ...configuration.evabyte import EvaByteConfig
from ...configuration.heads import MTPHeadConfig
from ...generation.tensors.masks import to_device
from ...generation.tensors.shared_models import call
from ...generation.tensors.tensor_files import below, warn_of_numbers
from ..common.backbone_parts import BackboneParts
from ..heads.circuit_head import FFHead
from ..heads.context import LeafContext, context_of, tables_of
from ..heads.family import build_head, init_head
from ..heads.layer import LayerAdapters
from ..heads.official import LAYERS, MTPC, load_tensors
from ..heads.window_distribution import WindowDistribution
from .backbone import EvaByteDecoderLayer, EvaByteModel

Model = TypeVar("Model", bound="DraftLayersMixin")


class EvaDraftLayers(LayerAdapters):
    """Adapters for every linear map of EvaByte's last k layers.

    Args:
        config: Of the model; `mtp_head.draft_layers` is k.
    """

    def __init__(self, config: EvaByteConfig) -> None:
        count = config.mtp_head.draft_layers
        if count > config.num_hidden_layers:
            raise ValueError(f"draft_layers={count}: the backbone has {config.num_hidden_layers} layers")
        with torch.device("meta"):
            shells = [EvaByteDecoderLayer(config, slot) for slot in range(count)]
        super().__init__(shells, config.mtp_head)

    def bind(self, body: EvaByteModel) -> Callable[..., Tensor]:
        """Return `EvaByteModel.continue_from` with the current weights, for a step or a call of `generate`."""
        weights = self.weights(list(body.layers)[-len(self.adapters) :])
        return partial(body.continue_from, layers=[partial(self.run, slot, own) for slot, own in enumerate(weights)])


class DraftLayersMixin:
    """The draft layers of `EvaByteForMTPC`.

    Attributes:
        draft_layers: None where there are none.
    """

    config: EvaByteConfig
    model: EvaByteModel
    lm_head: nn.Linear
    mtp_head: nn.Module | None
    draft_heads: FFHead | None
    head: nn.Module
    draft_layers: EvaDraftLayers | None
    train_only: Callable[[str], None]
    distribution_of_features: Callable[[Tensor], WindowDistribution]

    def add_draft_layers(self: Model, count: int, rank: int = 8, alpha: float | None = None) -> Model:
        """Add draft layers below the head (MtPC's stage 2); they start as the backbone's, which is frozen.

        Args:
            count: k, the number of the backbone's last layers; 0 removes them, and the backbone remains frozen until
                `train_only` is called.
            rank: Rank of their adapters.
            alpha: Scale times rank; None: twice the rank.

        Raises:
            ValueError: More layers than the backbone has.
        """
        old, changes = self.config.mtp_head, {"draft_layers": count, "draft_lora_rank": rank, "draft_lora_alpha": alpha}
        self.config.mtp_head = MTPHeadConfig.from_dict(old.to_dict() | changes)
        try:
            self.draft_layers = self._layers(old)
        except Exception:
            self.config.mtp_head = old
            raise
        if self.draft_layers is not None:
            self.train_only("drafter")
        return self

    def _layers(self, old: MTPHeadConfig) -> EvaDraftLayers | None:
        """Return the draft layers of the config: the existing ones where their options are unchanged."""
        if not self.config.mtp_head.draft_layers:
            return None
        if self.draft_layers is not None and old.draft_options() == self.config.mtp_head.draft_options():
            return self.draft_layers
        layers = EvaDraftLayers(self.config)
        for module in layers.modules():
            init_head(module, self.config.initializer_range)
        return layers.to(self.lm_head.weight)

    @property
    def hidden_layers(self) -> list[int]:
        """Indices, as in `output_hidden_states`, of what the head (or draft layers) reads, and of the last."""
        return [-1] if self.draft_layers is None else [-1 - self.config.mtp_head.draft_layers, -1]

    def features(
        self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return the states [B, L, D] that distributions read: the last ones, or those of the draft layers.

        Args:
            hidden_states: The backbone's; those that `hidden_layers` names are read.
            attention_mask: [B, L], 0 for padding.
            position_ids: [B or 1, L]; only to mark packed documents.
        """
        states = hidden_states[self.hidden_layers[0]]
        if self.draft_layers is None:
            return states
        run = self.draft_layers.bind(self.model)
        return run(states.detach(), attention_mask=attention_mask, position_ids=position_ids)

    def distribution(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> WindowDistribution:
        """Run the backbone and return the distributions of the next `window` tokens after every position.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, L], 0 for padding.
            position_ids: [B or 1, L]; only to mark packed documents.

        Returns:
            A distribution whose tensors have leading axes [B, L].
        """
        wanted = {"use_cache": False, "output_hidden_states": self.hidden_layers}
        states = self.model(input_ids, attention_mask, position_ids, **wanted).hidden_states
        return self.distribution_of_features(self.features(states, attention_mask, position_ids))


def install_published(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the heads in a directory of MtPC's authors, in place of its own.

    Of independent heads, the file's first one is left out: position 1 is the model's own `lm_head`.

    Raises:
        ValueError: Unknown tensors or settings, or another model; nothing is changed.
    """
    if not MTPC.recognises(folder, {}):
        raise ValueError(f"{folder}: no model@N.pt of MtPC's authors")
    fields, tensors = MTPC.read(folder)
    made_for = {name: fields.pop(name) for name in ("hidden_size", "vocab_size")} | fields.pop("backbone_config", {})
    for name, value in made_for.items():
        if (own := getattr(model.config, name)) != value:
            raise ValueError(f"{folder}: {name} of its backbone is {value}, and this backbone has {own}")
    del fields["base_model_name_or_path"]
    warn_of_numbers(folder, tensors.items())
    config = cast(EvaByteConfig, deepcopy(model.config))  # which also says how the layers attend
    config.mtp_head = MTPHeadConfig(**fields)
    config.validate()
    adapters, what = below(tensors, LAYERS), f"{folder}: its tensors do not make {fields['head_type']!r} heads"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYERS)}
    layers = EvaDraftLayers(config) if adapters else None
    if layers is not None:
        load_tensors(layers, adapters, what)
    sizes, window = (config.hidden_size, config.vocab_size), config.mtp_head.num_depths
    is_independent = config.mtp_head.family.rows_of_lm_head
    if is_independent:
        tensors = {"weight": tensors["weight"][config.vocab_size :].clone()}  # [(n - 1) V, D]
    with torch.device("meta"):
        head = FFHead(*sizes, window - 1) if is_independent else build_head(config.mtp_head, *sizes)
    load_tensors(head, tensors, what, assign=True)
    own_head = cast(nn.Linear, model.get_output_embeddings())
    parts = {"draft_layers": layers, "mtp_head": None if is_independent else head}
    if is_independent:
        parts["draft_heads"], config.num_pred_heads = head, window
    for name, part in parts.items():
        setattr(model, name, part if part is None else part.to(own_head.weight))
    model.config.mtp_head, model.config.num_pred_heads = config.mtp_head, config.num_pred_heads


def set_head_to_read(config: EvaByteConfig, name: str | PathLike | None, **hub: Any) -> bool:
    """Set a config's head to the one with which a directory is read, which the wanted one then replaces.

    Args:
        config: With the wanted head.
        name: The directory, or its name on the Hub; None: tensors are given, and fit the wanted head.
        hub: Options of the Hub.

    Returns:
        Whether the stored head is the wanted one but for draft layers.

    Raises:
        ValueError: A stored circuit of another shape.
    """
    wanted = config.mtp_head
    stored = wanted if name is None else EvaByteConfig.from_pretrained(name, **hub).mtp_head
    in_rows = wanted.family.rows_of_lm_head
    is_stored = wanted.same_parameters(stored)
    if not is_stored and not stored.family.rows_of_lm_head:
        raise ValueError(f"{name} holds mtp_head={stored.options()}, not {wanted.options()}; load that one")
    adds_layers = is_stored and not in_rows and wanted.draft_options() != stored.draft_options()
    config.mtp_head = stored if in_rows or not is_stored or adds_layers else wanted
    if config.mtp_head.family.rows_of_lm_head:
        config.mtp_head.window = min(config.mtp_head.window or 0, config.num_pred_heads)
    return adds_layers


def with_layer(layer: int, wanted: bool | int | list[int] | None) -> bool | list[int]:
    """Return the requested hidden states of the backbone, with those of `layer` added."""
    if wanted is True:
        return True
    return [layer, *([] if wanted is None or wanted is False else [wanted] if isinstance(wanted, int) else wanted)]


OWN, DRAFTS = "lm_head.weight", "draft_heads.weight"


class OwnAndDraftHeads(nn.Module):
    """The own head, which predicts the next token, and the draft heads after it, called like one `FFHead`.

    Made for a call: the model holds the two modules under their own names.
    """

    def __init__(self, own: nn.Module, drafts: FFHead | None, vocab_size: int) -> None:
        super().__init__()
        self.own, self.drafts, self.vocab_size = own, drafts, vocab_size

    @property
    def context(self) -> LeafContext | None:
        """The tables of the draft heads, which read the tokens before theirs."""
        return None if self.drafts is None else self.drafts.context

    def forward(
        self, hidden_states: Tensor, num_heads: int | None = None, backbone: BackboneParts | None = None, start: int = 0
    ) -> Tensor:
        """Return the logits [..., num_heads - start, V] of hidden states [..., D]; see `FFHead.forward`."""
        run = call if torch.is_grad_enabled() else nn.Module.__call__
        if start and self.drafts is not None:
            return run(self.drafts, hidden_states, None if num_heads is None else num_heads - 1, None, start - 1)
        own = run(self.own, hidden_states)[..., None, :]  # [..., 1, V]
        if self.drafts is None or num_heads == 1:
            return own
        drafts = run(self.drafts, hidden_states, None if num_heads is None else num_heads - 1)
        return torch.cat([own, to_device(drafts, own.device)], dim=-2)[..., start:, :]


def set_tables(model: DraftLayersMixin, old: LeafContext | None = None) -> None:
    """Give FF heads the tables of the config, a circuit alone its own; take over the `old` ones where they fit."""
    config = model.config
    if model.draft_heads is not None:
        tables = context_of(config.mtp_head, config.vocab_size) if model.mtp_head is None else None
        model.draft_heads.context = None if tables is None else tables.to(model.lm_head.weight)
    if old is not None and (tables := tables_of(model.head)) is not None:
        tables.take(old)


def split_heads(weight: Tensor, vocab_size: int, num_drafts: int) -> dict[str, Tensor]:
    """Return the weights of the own head and of any draft heads from those of all heads [N V, D], by name."""
    if not num_drafts or len(weight) == vocab_size:
        return {OWN: weight}
    return {OWN: weight[:vocab_size].clone(), DRAFTS: weight[vocab_size:].clone()}


def split_state_dict(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
    """Split the weight of a checkpoint in `state_dict`, before `load_state_dict` of a model reads it."""
    config = cast(EvaByteConfig, model.config)
    if (weight := state_dict.get(prefix + OWN)) is not None and len(weight) > config.vocab_size:
        parts = split_heads(weight, config.vocab_size, config.num_pred_heads - 1)
        state_dict |= {prefix + name: part for name, part in parts.items()}


class SplitHeads(ConversionOps):
    """Splits `lm_head.weight` of a checkpoint into the weights of the two modules, or joins them.

    Args:
        joins: Join.
    """

    def __init__(self, joins: bool = False) -> None:
        self.joins = joins

    def convert(
        self, input_dict: dict[str, list[Tensor]], *args: object, model: PreTrainedModel, **kwargs: object
    ) -> dict[str, Tensor]:
        """Return the new weights by name.

        One weight alone is joined with nothing if there are no draft heads, or if the own head is tied.
        """
        config = cast(EvaByteConfig, model.config)
        parts = {name: weights[0] for name, weights in input_dict.items()}
        if not self.joins:
            return split_heads(parts[OWN], config.vocab_size, config.num_pred_heads - 1)
        if len(parts) == 2:
            return {OWN: torch.cat([parts[OWN], parts[DRAFTS]])}
        if config.num_pred_heads > 1 and not (DRAFTS in parts and config.tie_word_embeddings):
            raise ValueError(f"{', '.join(parts)} cannot be saved without the other heads, which are in another shard")
        return parts

    @property
    def reverse_op(self) -> ConversionOps:
        """The opposite operation."""
        return SplitHeads(not self.joins)


register_checkpoint_conversion_mapping("evabyte", [WeightConverter(OWN, [OWN, DRAFTS], [SplitHeads()])], overwrite=True)
