"""All built-in families, and what is done with a head of any of them: build, initialise, ask for its distribution."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...configuration.fields import check_options
from ...configuration.head_families import HEAD_FAMILIES
from ...configuration.heads import MTPHeadConfig
from ..common.backbone_parts import BackboneParts
from ..common.draft_vocabulary import DraftVocabulary
from .circuit_head import CircuitHead as CircuitHead
from .circuit_head import FFHead as FFHead
from .context import with_context
from .family import FAMILIES
from .layer import LayerHead as LayerHead
from .medusa import HydraHead as HydraHead
from .medusa import MedusaHead as MedusaHead
from .window_distribution import PartialDistribution, WindowDistribution

_FROM_BACKBONE = ("hidden_size", "vocab_size", "base_model_name_or_path")


@runtime_checkable
class Resettable(Protocol):
    """A module that initialises its own parameters."""

    def reset_head(self, std: float) -> None:
        """Initialise all but loaded tensors; `std` is `initializer_range` of the model."""


def build_head(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> nn.Module:
    """Return the head module that `config` describes."""
    return FAMILIES[config.head_type].build(config, hidden_size, vocab_size)


def config_of_backbone(backbone: PreTrainedModel, **options: Any) -> MTPHeadConfig:
    """Return the config of heads for a backbone, whose layers it describes where heads have some.

    Raises:
        TypeError: An option that is no field of `MTPHeadConfig`.
    """
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
    """Initialise the parameters that a module of a head holds itself (`Resettable`), for a model's `_init_weights`."""
    if isinstance(module, Resettable):
        module.reset_head(std)


def window_distribution(
    head: nn.Module,
    config: MTPHeadConfig,
    features: Tensor,
    backbone: BackboneParts | None = None,
    vocabulary: DraftVocabulary | None = None,
) -> WindowDistribution:
    """Return the distribution of the next `config.window` tokens given features [..., F], in float32 (float64 stays).

    The head computes in its own dtype, not that of the features. A draft vocabulary is that of its columns.
    """
    whole = FAMILIES[config.head_type].distribution(head, config, _in_dtype(features, head), backbone)
    return _over_ids(with_context(whole, head, config), vocabulary)


def distribution_after(
    head: nn.Module,
    config: MTPHeadConfig,
    features: Tensor,
    last: Tensor,
    length: int,
    backbone: BackboneParts | None = None,
    vocabulary: DraftVocabulary | None = None,
) -> WindowDistribution:
    """Return `window_distribution` given its first token `last` [...] int64; its next `length` tokens are exact.

    Only what these drafts read is computed; `length` is at least 1, at most `config.window` - 1.
    """
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
