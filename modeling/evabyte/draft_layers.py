"""MtPC's draft LoRA for EvaByte's own heads: its last k layers once more, with adapters and an EVA cache of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ...configuration import EvaByteConfig
from ..heads.draft_layers import LayerAdapters
from .backbone import EvaByteDecoderLayer, EvaByteModel


class EvaDraftLayers(LayerAdapters):
    """Adapters for every linear map of EvaByte's last k layers.

    Args:
        config: Of the model; `mtp_head.draft_layers` is k.

    Raises:
        ValueError: More layers than the backbone has.
    """

    def __init__(self, config: EvaByteConfig) -> None:
        count = config.mtp_head.draft_layers
        if count > config.num_hidden_layers:
            raise ValueError(f"draft_layers={count}: the backbone has {config.num_hidden_layers} layers")
        with torch.device("meta"):
            shells = [EvaByteDecoderLayer(config, slot) for slot in range(count)]
        super().__init__(shells, config.mtp_head)

    def bind(self, body: EvaByteModel) -> Callable[..., torch.Tensor]:
        """The layers as they stand now: `EvaByteModel.continue_from` with them, for a step or a call of `generate`.

        Raises:
            ValueError: See `LayerAdapters.weights`.
        """
        weights = self.weights(body.layers[-len(self.adapters) :])
        return partial(body.continue_from, layers=[partial(self.run, slot, own) for slot, own in enumerate(weights)])
