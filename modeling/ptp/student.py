"""PTPStudent: the parts that add parallel token prediction to a backbone, saved without it.

The backbone itself runs, with everything that happened to it since the student was attached: its adapters are hooks
that are there while a call decodes.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from os import PathLike
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...configuration.fields import field
from ...configuration.ptp import PTPConfig, PTPStudentConfig
from ...generation.attach import AttachableDrafter, adopt_fields
from ...generation.backbone.wrapped_models import Kwargs, LayerDivision, adapter_marks, base_layer, untyped, unwrap
from ...generation.drafter import DRAFTERS
from ..common.loading import LOADS, StrictLoadingMixin
from ..common.outputs import PTPOutput
from ..heads.window_distribution import WindowDistribution
from .conversion import write_run
from .gated_lora import ADAPTER, Gate, PackedMixin, current_gate, join_siblings, opened, with_adapter
from .generation import ParallelDrafter
from .inputs import SLOT_PARTS, has_slots, slot_parts
from .model import PTPForCausalLM, dense_mask

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class LayerAdapter(PackedMixin):
    """The A and B of a layer with a gated adapter, apart from it; B is in a module of the kind `up`."""

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
        if not has_slots(self.config, uniforms, masks):
            return self.backbone(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        embeds = self.with_slots(self.get_input_embeddings()(input_ids), uniforms, masks)
        with opened(Gate(input_ids.shape[1], embeds.shape[1], self)):
            mask = dense_mask(attention_mask, embeds)
            return self.backbone(inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids, **kwargs)


class HookedBackbone:
    """Runs a backbone with the adapters of a student; its `model` takes slots, while they are `installed`."""

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


_SAME = (
    *("model_type", "hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
"""Fields of a backbone that determine the shapes of adapters."""


class PTPStudent(StrictLoadingMixin, ParallelDrafter, AttachableDrafter, PreTrainedModel):
    """Gated adapters and an embedding of uniforms, or masks, for a backbone that is unchanged.

    An attached student passes as `assistant_model`: `backbone.generate(..., assistant_model=student)` produces the
    backbone's own output, with the options of `ParallelGenerationMixin`. `student.whole` is a `PTPForCausalLM` over the
    backbone's own tensors, which trainers take: what it learns is the student's.

    Args:
        config: Configuration, with the backbone's inside.

    Raises:
        ValueError: A config without the backbone's, or of a backbone that cannot carry auxiliary positions exactly.

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
        self._backbones, self._models, self._hooked = [], [], []  # in lists, so that models are no submodules
        with torch.device("meta"):  # to learn which layers are adapted
            whole = PTPForCausalLM(PTPConfig(backbone_config=_copy(config.backbone_config), **config.options))
        self.adapters = _adapters_like(whole.backbone)
        for name, part in slot_parts(config, config.backbone_config.hidden_size).items():
            setattr(self, name, part)
        self.post_init()

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
        """The attached backbone and this student as one model, made again where the backbone's tensors were replaced.

        Raises:
            RuntimeError: The student is not attached.
        """
        backbone = self.backbone
        state = _state_of(backbone)
        if not self._models or self._models[0] != state:
            self._models = [state, self._joined(backbone)]
        return self._models[1]

    @property
    def hooked(self) -> HookedBackbone:
        """The attached backbone itself, which runs slots in calls."""
        if not self._hooked:
            self._hooked = [HookedBackbone(self.whole, self.backbone, self.adapters)]
        return self._hooked[0]

    def verifier_model(self, backbone: PreTrainedModel) -> PreTrainedModel:
        return self.hooked.model

    def running(self, backbone: PreTrainedModel) -> AbstractContextManager[None]:
        return self.hooked.installed()

    def slot_distribution(self, states: Tensor, before: Tensor) -> WindowDistribution:
        return self.hooked.model.slot_distribution(states, before)

    def _joined(self, backbone: PreTrainedModel) -> PTPForCausalLM:
        model = PTPForCausalLM.from_backbone(backbone, **self.config.options)
        _hand_over((self, self.adapters), (model, model.backbone))
        model.train_only("drafter")
        return model.train(self.training)

    def export(self, folder: str | PathLike, layout: str = "official") -> None:
        """Write a run of the public PTP code, for the backbone of `base_model_name_or_path`."""
        if self.is_attached:
            return self.whole.export(folder, layout)
        state = {name.removeprefix("adapters."): each for name, each in self.state_dict().items()}
        dtype = self.config.get_text_config().dtype or torch.float32
        return write_run(folder, layout, self.config, state, self.config.base_model_name_or_path, dtype)

    def sampling_defaults(self, sources: tuple[object, ...]) -> Kwargs:
        """transformers' own: an assistant does not change the distribution of its target."""
        return {}

    def made_for(self) -> Mapping[str, object]:
        made = self.config.get_text_config().get_text_config()
        return {name: field(made, name) for name in _SAME}

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Follow the backbone's device; its own parts have float32 at least."""
        untyped(self).to(device=backbone.device, dtype=torch.promote_types(backbone.dtype, torch.float32))
        adopt_fields(self.config, backbone)
        self._models = [_state_of(backbone), self._joined(backbone)]

    def on_detach(self) -> None:
        self._models, self._hooked = [], []

    def forward(self, *args: object, **kwargs: object) -> PTPOutput:
        return self.whole(*args, **kwargs)

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a copy or a pickle, without the backbone and the model made of it."""
        return super().__getstate__() | {"_models": [], "_hooked": []}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if LOADS.get() and next(module.parameters(recurse=False), None) is not None:
            return
        super()._init_weights(module)
        if isinstance(module, _Up):
            for up in module.parameters():
                nn.init.zeros_(up)


class _Up(nn.ModuleDict):
    """The B of a layer, which begins with zeros."""


def _adapters_like(backbone: nn.Module) -> nn.Module:
    """Return new A's and B's under the names of the adapted layers of a model."""
    root = nn.Module()
    for name, layer in _layers(backbone):
        parent, (*path, leaf) = root, name.split(".")
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(leaf, LayerAdapter(layer, _Up))
    join_siblings(root)
    return root


def _copy(config: PreTrainedConfig) -> PreTrainedConfig:
    return type(config).from_dict(config.to_dict())


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and modules of gated adapters."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


def _hand_over(source: tuple[nn.Module, nn.Module], target: tuple[nn.Module, nn.Module]) -> None:
    """Share the trained parts of one model (the module with slot parts, that with adapters) with another."""
    layers = dict(_layers(source[1]))
    for name, own in _layers(target[1]):
        if (layer := layers.get(name)) is not None:
            own.lora_A[ADAPTER], own.lora_B[ADAPTER] = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    for name in SLOT_PARTS:
        setattr(target[0], name, getattr(source[0], name))


def _state_of(backbone: PreTrainedModel) -> tuple[Hashable, ...]:
    """Return values that change when the tensors of a backbone are moved, cast, resized or adapted."""
    backbone = unwrap(backbone)
    tensors = tuple((p.data_ptr(), p.dtype) for name, p in backbone.named_parameters() if "lora_" not in name)
    return tensors, backbone.config._attn_implementation, adapter_marks(backbone)


DRAFTERS["student"] = PTPStudent
