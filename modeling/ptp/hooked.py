"""A student's adapters on the layers of its backbone, as hooks that are there while a call decodes.

The backbone itself runs, with everything that happened to it since the student was attached: hooks of a user, adapters
of peft that were switched, scaled or chosen per sequence, weights that were written to, layers that were replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...generation.tensors.shared_models import LayerDivision
from ...generation.tensors.wrapped_models import base_layer
from .gated_lora import ADAPTER, Gate, PackedMixin, current_gate, opened, with_adapter
from .inputs import check_positions, has_slots
from .model import PTPForCausalLM, dense_mask

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class LayerAdapter(PackedMixin):
    """The A and B of a layer, apart from it.

    Args:
        layer: A layer with a gated adapter, whose sizes and scale it takes.
        up: The kind of module that has B.
    """

    def __init__(self, layer: Any, up: type[nn.ModuleDict]) -> None:
        super().__init__()
        self.in_features, self.scaling = layer.in_features, dict(layer.scaling)
        for name, kind in (("lora_A", nn.ModuleDict), ("lora_B", up)):
            rows, columns = getattr(layer, name)[ADAPTER].weight.shape
            self.add_module(name, kind({ADAPTER: nn.Linear(columns, rows, bias=False)}))


class SlottedBackbone(PTPForCausalLM):
    """A backbone that reads slots after its tokens: its own forward is called, and returns logits of both."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        uniforms: Tensor | None = None,
        masks: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the backbone's outputs; see `PTPForCausalLM.forward` for the arguments."""
        if not has_slots(self.config, uniforms, masks):
            return self.backbone(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        check_positions(self.config, position_ids)
        embeds = self.with_slots(self.get_input_embeddings()(input_ids), uniforms, masks)
        with opened(Gate(input_ids.shape[1], embeds.shape[1], self)):
            mask = dense_mask(attention_mask, embeds)
            return self.backbone(inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids, **kwargs)


class HookedBackbone:
    """Runs a backbone with the adapters of a student.

    Args:
        whole: A model with the student's parts, whose backbone is replaced by the one that runs.
        backbone: The backbone.
        adapters: Those of the student, under the names of the layers that they belong to.

    Attributes:
        model: Takes slots, while the adapters are `installed`.
    """

    def __init__(self, whole: PTPForCausalLM, backbone: PreTrainedModel, adapters: nn.Module) -> None:
        self.model = copy.copy(whole)
        self.model.__class__ = SlottedBackbone
        own = {name: copy.copy(held) for name, held in vars(whole).items() if isinstance(held, dict)}
        vars(self.model).update(own)  # what it registers is no part of the whole model
        self.model.backbone = backbone
        self.model.config = copy.copy(whole.config)
        self.model.config.backbone_config = backbone.config
        layers = {name: base_layer(layer) for name, layer in backbone.named_modules()}
        named = [(name, adapter) for name, adapter in adapters.named_modules() if isinstance(adapter, LayerAdapter)]
        self.pairs = [(layers[name], adapter) for name, adapter in named]
        for layer, adapter in self.pairs:
            adapter.division = LayerDivision.of(layer)
        self.lock, self.calls, self.handles = Lock(), 0, list["RemovableHandle"]()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the backbone's layers call the adapters; calls in several threads share the hooks."""
        with self.lock:
            self.calls += 1
            if self.calls == 1:
                self.handles = [
                    layer.register_forward_hook(partial(_adapted, self.model, adapter)) for layer, adapter in self.pairs
                ]
        try:
            with opened(None):  # a thread has a gate from its first graph on, which is not compiled again then
                yield
        finally:
            with self.lock:
                self.calls -= 1
                if self.calls == 0:
                    for handle in self.handles:
                        handle.remove()


def _adapted(model: object, adapter: LayerAdapter, layer: nn.Module, inputs: tuple[Tensor], result: Tensor) -> Tensor:
    """Return a layer's result with its adapter's at the slots of a forward of `model`."""
    gate = current_gate()
    return result if gate is None or gate.model is not model else with_adapter(adapter, gate, inputs[0], result)
