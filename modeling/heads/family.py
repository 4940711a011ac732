"""The record of a head family, the table of all families, and what is done with a head of any of them.

One `register(HeadFamily(...))` adds a family; each built-in one does so at the end of its file. Everything else reads
records, never a name or a class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...configuration.fields import check_options
from ...configuration.foreign_fields import FieldTable
from ...configuration.head_families import HEAD_FAMILIES, HeadFamilyFacts
from ...configuration.heads import HEAD_TYPES, MTPHeadConfig
from ...generation.tensors.tensor_files import Fields, Tensors
from ..common.backbone_parts import BackboneParts
from ..common.draft_vocabulary import DraftVocabulary
from .context import with_context
from .window_distribution import PartialDistribution, WindowDistribution

Directory = tuple[Fields, Tensors]
"""Fields and tensors of a directory."""
Parts = BackboneParts | None
"""What a head borrows of its backbone."""


@dataclass(frozen=True)
class HeadLayout:
    """A directory format of other tools."""

    name: str  # `layout` of `MTPHeads.export`
    recognises: Callable[[Path, Fields], bool]  # from a directory and the fields of its config.json
    read: Callable[[Path], Directory]  # to options of `MTPHeadConfig` and tensors of the head
    refusal: Callable[[MTPHeadConfig], str | None]  # why such heads cannot be written
    write: Callable[[MTPHeadConfig, Tensors, PreTrainedModel], Directory] = lambda config, tensors, backbone: ({}, {})
    tensors_file: str = "model.safetensors"  # or, with another suffix, a pickle of tensors
    fields_file: str = "config.json"
    fields: FieldTable | None = None  # that may stand there; None: `read` refuses unknown ones itself


@dataclass(frozen=True)
class Circuit:
    """What tells one family of circuits from another; independent positions are the one without sums."""

    distribution: Callable[..., WindowDistribution]  # from its parameters, in this order, and the leaves
    parameters: tuple[str, ...] = ("root_logits",)  # the root, then the [r, r] sums if the family has any
    sum_counts: Callable[[int], tuple[int, ...]] = lambda window: (0,)  # of these sums, and if all steps share theirs
    persistent: bool = False  # states of a new head tend to stay what they are from one sum to the next

    def shapes(self, window: int, rank: int) -> dict[str, list[tuple[int, ...]]]:
        """Return the last axes that each parameter may have; without those that this window is too short for."""
        counts = sorted(set(self.sum_counts(window)))
        sums = [(count, rank, rank) for count in counts]
        return dict(zip(self.parameters, ([(rank,)], sums if any(counts) else [])))


def last_state(head: nn.Module, states: Sequence[Tensor], *context: object) -> Tensor:
    """Return the last of some states, for any head."""
    return states[-1]


@dataclass(frozen=True)
class HeadFamily:
    """The record of a family of heads.

    Args:
        facts: Facts for configs and cards.
        build: From the config, the width d and the number of token ids V to the module, which has `vocab_size`; its
            `start_from`, if any, initialises new heads from the parts of a backbone, as its own as far as possible.
        distribution: From the module (or a wrapper of peft), its config, features [..., F], the backbone (or None),
            `start` and `stop` to the distribution, in float32 (float64 stays). `start` is the first position that is
            read, 0 by default: what only earlier ones need may be left out, and independent positions are those from
            here on. `stop` is the position after the last one that is read; None: n.
        features: From the module, the states that `hidden_layers` names, attention mask, position ids, backbone and
            cache to features [B, T, F]; the last state by default.
        hidden_layers: Which states of the backbone it reads, as `output_hidden_states` counts them, the last included.
        layer_config: From a head's config and its backbone's to the config of the decoder layer that it needs, if any.
        fit: From the module, its config and a backbone: adopts its properties whenever heads are attached.
        is_independent: Whether the distribution after the window's first token does not depend on that token, but for
            leaves that read it (`context`).
        layouts: Formats of other tools.
        circuit: Its parameters, where `circuit_from_logits` can build its distribution.
    """

    facts: HeadFamilyFacts
    build: Callable[[MTPHeadConfig, int, int], nn.Module]
    distribution: Callable[..., WindowDistribution]
    features: Callable[..., Tensor] = last_state
    hidden_layers: Callable[[MTPHeadConfig], list[int]] = lambda config: [-1]
    layer_config: Callable[[MTPHeadConfig, PreTrainedConfig], Fields | None] = lambda config, text: None
    fit: Callable[..., None] = lambda head, config, backbone: None
    is_independent: bool = False
    layouts: Sequence[HeadLayout] = ()
    circuit: Circuit | None = None

    @property
    def is_built_in(self) -> bool:
        """Whether it belongs to this library."""
        return self.facts.name in HEAD_TYPES

    def reads_besides(self, config: MTPHeadConfig) -> str | None:
        """Return what heads read besides the last hidden state of one position, as a phrase; None for nothing."""
        if config.draft_layers:
            return "the states of draft layers"
        if self.facts.attends(config):
            return "the states of earlier positions"
        if set(layers := self.hidden_layers(config)) != {-1}:
            return f"the hidden states {layers}"
        if self.facts.sequential:
            return "the embeddings of drafted tokens"
        return None if self.features is last_state else "features that it makes itself"


FAMILIES: dict[str, HeadFamily] = {}
"""All families by name."""


def register(family: HeadFamily) -> HeadFamily:
    """Add a family, before heads of it are loaded: its name can then be the `head_type` of a `MTPHeadConfig`."""
    facts = family.facts
    if HEAD_FAMILIES.get(facts.name, facts) is not facts or facts.name in FAMILIES:
        raise ValueError(f"name={facts.name!r}: a family of heads with this name is registered")
    HEAD_FAMILIES[facts.name] = facts
    FAMILIES[facts.name] = family
    return family


_FROM_BACKBONE = ("hidden_size", "vocab_size", "base_model_name_or_path")


def build_head(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> nn.Module:
    """Return the head module that `config` describes."""
    return FAMILIES[config.head_type].build(config, hidden_size, vocab_size)


def config_of_backbone(backbone: PreTrainedModel, **options: Any) -> MTPHeadConfig:
    """Return the config of heads for a backbone, whose layers it describes where heads have some."""
    kind = options.get("head_type", "ff")
    own = HEAD_FAMILIES[kind].defaults if kind in HEAD_FAMILIES else {}
    fields = [name for name in options if name not in own]
    check_options(fields, MTPHeadConfig, "MTPHeads.from_backbone", _FROM_BACKBONE)
    text = backbone.config.get_text_config()
    options |= {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
    config = MTPHeadConfig(base_model_name_or_path=backbone.config.name_or_path or None, **options)
    if config.backbone_config is None:
        own_layers = FAMILIES[config.head_type].layer_config(config, text)
        config.backbone_config = text.to_dict() if config.draft_layers else own_layers
    return config


def init_head(module: nn.Module, std: float = 0.02) -> None:
    """Let a module of a head initialise its own parameters (`reset_head`), for a model's `_init_weights`."""
    if (reset := getattr(module, "reset_head", None)) is not None:
        reset(std)


def window_distribution(
    head: nn.Module,
    config: MTPHeadConfig,
    features: Tensor,
    backbone: Parts = None,
    vocabulary: DraftVocabulary | None = None,
) -> WindowDistribution:
    """Return the distribution of the next `window` tokens given features [..., F], in float32 (float64 stays)."""
    whole = FAMILIES[config.head_type].distribution(head, config, _in_dtype(features, head), backbone)
    return _over_ids(with_context(whole, head, config), vocabulary)


def distribution_after(
    head: nn.Module,
    config: MTPHeadConfig,
    features: Tensor,
    last: Tensor,
    length: int,
    backbone: Parts = None,
    vocabulary: DraftVocabulary | None = None,
) -> WindowDistribution:
    """Return `window_distribution` given its first token `last` [...] int64; its next `length` tokens are exact."""
    family, features = FAMILIES[config.head_type], _in_dtype(features, head)
    if family.is_independent:
        known = last if vocabulary is None or not config.context else vocabulary.codes(last)
        rest = family.distribution(head, config, features, backbone, 1, length + 1)
        return _over_ids(with_context(rest, head, config, known[..., None]), vocabulary)
    whole = family.distribution(head, config, features, backbone, 0, length + 1)
    return _over_ids(with_context(whole, head, config), vocabulary).condition(last)


def _over_ids(distribution: WindowDistribution, vocabulary: DraftVocabulary | None) -> WindowDistribution:
    return distribution if vocabulary is None else PartialDistribution(distribution, vocabulary)


def _in_dtype(features: Tensor, head: nn.Module) -> Tensor:
    own = (parameter.dtype for parameter in head.parameters() if parameter.is_floating_point())
    return features.to(next(own, features.dtype))
