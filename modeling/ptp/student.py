"""PTPStudent: the parts that add parallel token prediction to a backbone, saved without it.

The backbone itself runs, with everything that happened to it since: adapters are hooks while a call decodes.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from os import PathLike
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from ...configuration.fields import field
from ...configuration.ptp import PTPStudentConfig
from ...generation.attach import AttachableDrafter, adopt_fields
from ...generation.backbone.wrapped_models import LayerDivision, adapter_marks, base_layer, unwrap
from ...generation.drafter import DRAFTERS
from ..common.loading import LOADS, StrictLoadingMixin
from ..common.outputs import PTPOutput
from ..heads.window_distribution import WindowDistribution
from .conversion import write_run
from .gated_lora import ADAPTER, Gate, PackedMixin, current_gate, join_siblings, opened, with_adapter, zero_ups
from .generation import ParallelDrafter
from .inputs import SlotPartsMixin
from .model import PTPForCausalLM, dense_mask

C = TypeVar("C", bound=PreTrainedConfig)


class LayerAdapter(PackedMixin):
    """The A and B of a layer with a gated adapter, apart from it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features, self.scaling = layer.in_features, dict(layer.scaling)
        for name in ("lora_A", "lora_B"):
            rows, columns = getattr(layer, name)[ADAPTER].weight.shape
            self.add_module(name, nn.ModuleDict({ADAPTER: nn.Linear(columns, rows, bias=False)}))


class SlottedBackbone(PTPForCausalLM):
    """A backbone whose own forward reads slots after its tokens, with a student's adapters while `installed`."""

    def __init__(self, whole: PTPForCausalLM, backbone: PreTrainedModel, adapters: nn.Module) -> None:
        own = {name: copy.copy(held) if isinstance(held, dict) else held for name, held in vars(whole).items()}
        vars(self).update(own)  # its parts, of which nothing is drawn anew; what it registers is no part of `whole`
        self.backbone, self.config = backbone, copy.copy(whole.config)
        self.config.backbone_config = backbone.config
        layers = {name: base_layer(layer) for name, layer in backbone.named_modules()}
        self.pairs: list[tuple[nn.Module, LayerAdapter]] = []
        for name, adapter in _layers(adapters):
            adapter.division = LayerDivision.of(layers[name])
            self.pairs.append((layers[name], adapter))
        self.lock, self.calls, self.handles = Lock(), 0, list[RemovableHandle]()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the backbone's layers call the adapters; calls in several threads share the hooks."""
        with self.lock:
            self.calls += 1
            if self.calls == 1:
                hooked = ((layer, partial(self._adapted, adapter)) for layer, adapter in self.pairs)
                self.handles = [layer.register_forward_hook(hook) for layer, hook in hooked]
        try:
            with opened(None):  # a thread has a gate from its first graph on, which is not compiled again then
                yield
        finally:
            with self.lock:
                self.calls -= 1
                for handle in self.handles if self.calls == 0 else ():
                    handle.remove()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        uniforms: Tensor | None = None,
        masks: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if uniforms is None and masks is None:
            return self.backbone(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        embeds = self.with_slots(self.get_input_embeddings()(input_ids), uniforms, masks)
        with opened(Gate(input_ids.shape[1], embeds.shape[1], self)):
            mask = dense_mask(attention_mask, embeds)
            return self.backbone(inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids, **kwargs)

    def _adapted(self, adapter: LayerAdapter, layer: nn.Module, inputs: tuple[Tensor], result: Tensor) -> Tensor:
        """Return a layer's result with its adapter's at the slots of this model's forward."""
        gate = current_gate()
        return result if gate is None or gate.model is not self else with_adapter(adapter, gate, inputs[0], result)


class PTPStudent(StrictLoadingMixin, SlotPartsMixin, ParallelDrafter, AttachableDrafter, PreTrainedModel):
    """Gated adapters and an embedding of uniforms, or masks, for a backbone that is unchanged.

    An attached student passes as `assistant_model`: `backbone.generate(..., assistant_model=student)` produces the
    backbone's own output, with the options of `ParallelGenerationMixin`. `student.whole` is a `PTPForCausalLM` over the
    backbone's own tensors, which trainers take: what it learns is the student's.

    Args:
        config: Configuration, with the backbone's inside.

    Example:
        >>> student = PTPStudent.from_backbone(backbone, num_slots=8)
        >>> PTPTrainer(student.whole, options, train_dataset=data).train()
        >>> student.save_pretrained("student")
        >>> student = PTPStudent.from_pretrained("student").attach(backbone)
        >>> out = backbone.generate(**inputs, assistant_model=student, do_sample=True, seed=7)
    """

    config: PTPStudentConfig
    config_class = PTPStudentConfig
    remote_classes = {"AutoModel": "PTPStudent"}
    travels_when_pushed = False
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: PTPStudentConfig) -> None:
        if config.backbone_config is None:
            raise ValueError("PTPStudentConfig needs a backbone_config")
        super().__init__(config)
        self._backbones, self._models, self._slotted = [], [], []  # in lists, so that models are no submodules
        with torch.device("meta"):  # to learn which layers are adapted
            whole = PTPForCausalLM(_copy(config))
        self.adapters = _adapters_like(whole.backbone)
        self.add_slot_parts(config, config.backbone_config.hidden_size)
        self.post_init()
        zero_ups(self)

    @classmethod
    def from_backbone(cls, backbone: PreTrainedModel, variant: str = "one_hot", **options: Any) -> PTPStudent:
        """Return a new student for `backbone`, attached; arguments of `PTPForCausalLM.from_backbone`."""
        return cls.from_model(PTPForCausalLM.from_backbone(backbone, variant, **options)).attach(backbone)

    @classmethod
    def from_model(cls, model: PTPForCausalLM) -> PTPStudent:
        """Return the student of a whole model: it shares the parts of the model, and is not attached."""
        config = PTPStudentConfig(
            backbone_config=_copy(model.config.backbone_config),
            base_model_name_or_path=model.backbone.config.name_or_path or None,
            **{name: getattr(model.config, name) for name in PTPStudentConfig().options},
        )
        student = cls(config)
        _hand_over((model, model.backbone), (student, student.adapters))
        return student.train(model.training)

    @property
    def whole(self) -> PTPForCausalLM:
        """The attached backbone and this student as one model, made again where its tensors were replaced."""
        backbone = self.backbone
        if not self._models or self._models[0] != _state_of(backbone):
            model = PTPForCausalLM.from_backbone(backbone, **self.config.options)
            _hand_over((self, self.adapters), (model, model.backbone))
            model.train_only("drafter")
            self._models = [_state_of(backbone), model.train(self.training)]
        return self._models[1]

    @property
    def slotted(self) -> SlottedBackbone:
        """The attached backbone itself, which runs slots in calls."""
        if not self._slotted:
            self._slotted = [SlottedBackbone(self.whole, self.backbone, self.adapters)]
        return self._slotted[0]

    def verifier_model(self, backbone: PreTrainedModel) -> PreTrainedModel:
        return self.slotted

    def running(self, backbone: PreTrainedModel) -> AbstractContextManager[None]:
        return self.slotted.installed()

    def slot_distribution(self, states: Tensor, before: Tensor) -> WindowDistribution:
        return self.slotted.slot_distribution(states, before)

    def export(self, folder: str | PathLike, layout: str = "official") -> None:
        """Write a run of the public PTP code, for the backbone of `base_model_name_or_path`."""
        if self.is_attached:
            return self.whole.export(folder, layout)
        state = {name.removeprefix("adapters."): each for name, each in self.state_dict().items()}
        dtype = self.config.get_text_config().dtype or torch.float32
        return write_run(folder, layout, self.config, state, self.config.base_model_name_or_path, dtype)

    def _init_weights(self, module: nn.Module) -> None:
        if not LOADS.get():
            super()._init_weights(module)

    def made_for(self) -> Mapping[str, object]:
        made = self.config.get_text_config().get_text_config()
        sizes = "model_type", "hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "head_dim"
        return {name: field(made, name) for name in (*sizes, "num_attention_heads", "num_key_value_heads")}

    def on_attach(self, backbone: PreTrainedModel) -> None:
        cast(nn.Module, self).to(device=backbone.device, dtype=torch.promote_types(backbone.dtype, torch.float32))
        adopt_fields(self.config, backbone)
        self._models = []
        self.whole.train(self.training)  # made at once, so that a backbone that does not fit is refused

    def on_detach(self) -> None:
        self._models, self._slotted = [], []

    def forward(self, *args: object, **kwargs: object) -> PTPOutput:
        return self.whole(*args, **kwargs)

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_models": [], "_slotted": []}


def _adapters_like(backbone: nn.Module) -> nn.Module:
    """Return new A's and B's under the names of the adapted layers of a model."""
    root = nn.Module()
    for name, layer in _layers(backbone):
        parent, (*path, leaf) = root, name.split(".")
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(leaf, LayerAdapter(layer))
    join_siblings(root)
    return root


def _copy(config: C) -> C:
    return type(config).from_dict(config.to_dict())


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and modules of gated adapters."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


def _hand_over(source: tuple[SlotPartsMixin, nn.Module], target: tuple[SlotPartsMixin, nn.Module]) -> None:
    """Share the trained parts of one model (the module with slot parts, that with adapters) with another."""
    layers = dict(_layers(source[1]))
    for name, own in _layers(target[1]):
        if (layer := layers.get(name)) is not None:
            own.lora_A[ADAPTER], own.lora_B[ADAPTER] = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    for name, part in source[0].slot_parts().items():
        setattr(target[0], name, part)


def _state_of(backbone: PreTrainedModel) -> tuple[Hashable, ...]:
    """Return values that change when the tensors of a backbone are moved, cast, resized or adapted."""
    backbone = unwrap(backbone)
    tensors = tuple((p.data_ptr(), p.dtype) for name, p in backbone.named_parameters() if "lora_" not in name)
    return tensors, backbone.config._attn_implementation, adapter_marks(backbone)


DRAFTERS["student"] = PTPStudent
