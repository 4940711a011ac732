"""PTPStudent: what a backbone needs for parallel token prediction, apart from it, in a directory of megabytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ...configuration.ptp import PTPConfig, PTPStudentConfig
from ...generation.attach import AttachableDrafter, adopt_special_ids
from ...generation.parallel import ParallelDrafter
from ..heads.window_distribution import WindowDistribution
from ..loading import StrictLoadingMixin
from ..merging import adapter_marks
from ..unwrapping import unwrap
from .embedding import SLOT_PARTS, slot_parts
from .gated_lora import ADAPTER
from .model import PTPForCausalLM

_SAME = ("model_type", "hidden_size", "vocab_size", "num_hidden_layers")


class PTPStudent(StrictLoadingMixin, ParallelDrafter, AttachableDrafter, PreTrainedModel):
    """Gated adapters and an embedding of uniforms, or masks, for a backbone that stays as it is.

    An attached student passes as `assistant_model`: `backbone.generate(..., assistant_model=student)` writes the
    backbone's own text, with the options of `ParallelGenerationMixin`. Behind it stands a `PTPForCausalLM` over the
    backbone's own tensors, `student.whole`, which trainers take: what it learns is the student's.

    Args:
        config: Configuration, with the backbone's inside.

    Raises:
        ValueError: A config without the backbone's, or of a backbone that cannot carry auxiliary rows exactly.

    Example:
        >>> student = PTPStudent.from_backbone(backbone, num_slots=8)
        >>> PTPTrainer(student.whole, options, train_dataset=data).train()
        >>> student.save_pretrained("student")
        >>> student = PTPStudent.from_pretrained("student").attach(backbone)
        >>> out = backbone.generate(**inputs, assistant_model=student, do_sample=True, seed=7)
    """

    config_class = PTPStudentConfig
    remote_classes = {"AutoModel": "PTPStudent"}
    travels_when_pushed = False
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: PTPStudentConfig) -> None:
        if config.backbone_config is None:
            raise ValueError("PTPStudentConfig needs a backbone_config")
        super().__init__(config)
        self._backbones, self._models = [], []  # of models, in lists, so that they are no submodules
        with torch.device("meta"):  # to learn which layers are adapted
            whole = PTPForCausalLM(PTPConfig(backbone_config=_copy(config.backbone_config), **config.options))
        self.adapters = _adapters_like(whole.backbone)
        for name, part in slot_parts(config, config.backbone_config.hidden_size).items():
            setattr(self, name, part)
        self.post_init()

    @classmethod
    def from_backbone(cls, backbone: PreTrainedModel, variant: str = "one_hot", **options: Any) -> PTPStudent:
        """A new student for `backbone`, attached.

        Args:
            backbone: A causal language model of transformers; of a PeftModel, the model within.
            variant: `"one_hot"`, `"categorical"` or `"mask"`.
            **options: See `PTPForCausalLM.from_backbone`.
        """
        return cls.from_model(PTPForCausalLM.from_backbone(backbone, variant, **options)).attach(backbone)

    @classmethod
    def from_model(cls, model: PTPForCausalLM) -> PTPStudent:
        """The student of a whole model: its parts are those of the model, and it is attached to nothing."""
        config = PTPStudentConfig(
            backbone_config=_copy(model.config.backbone_config),
            base_model_name_or_path=model.backbone.config._name_or_path or None,
            **{name: getattr(model.config, name) for name in PTPStudentConfig().options},
        )
        student = cls(config)
        for name, own in _layers(student.adapters):
            layer = model.backbone.get_submodule(name)
            own.lora_A[ADAPTER], own.lora_B[ADAPTER] = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        for name in SLOT_PARTS:
            setattr(student, name, getattr(model, name))
        return student.train(model.training)

    @property
    def whole(self) -> PTPForCausalLM:
        """The attached backbone and this student as one model; made anew where the backbone's tensors were replaced.

        Raises:
            RuntimeError: The student is not attached.
        """
        backbone = self.backbone
        marks = _marks_of(backbone)
        if not self._models or self._models[0] != marks:
            self._models = [marks, self._joined(backbone)]
        return self._models[1]

    def runner(self, backbone: PreTrainedModel) -> PTPForCausalLM:
        """What runs forwards with slots in them: on tokens it is the backbone."""
        return self.whole

    def slot_distribution(self, states: torch.Tensor, before: torch.Tensor) -> WindowDistribution:
        """`PTPForCausalLM.slot_distribution`."""
        return self.whole.slot_distribution(states, before)

    def _joined(self, backbone: PreTrainedModel) -> PTPForCausalLM:
        model = PTPForCausalLM.from_backbone(backbone, **self.config.options)
        for name, own in _layers(self.adapters):
            layer = model.backbone.get_submodule(name)
            layer.lora_A[ADAPTER], layer.lora_B[ADAPTER] = own.lora_A[ADAPTER], own.lora_B[ADAPTER]
        for name in SLOT_PARTS:
            setattr(model, name, getattr(self, name))
        model.train_only("drafter")
        return model.train(self.training)

    def sampling_defaults(self, sources: tuple[Any, ...]) -> dict[str, Any]:
        """transformers' own: an assistant does not change the distribution of its target."""
        return {}

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuses a backbone that the student was not made for.

        Raises:
            ValueError: Another kind of model, or another size.
        """
        for name in _SAME:
            own, theirs = (getattr(config, name, None) for config in (self.config.backbone_config, backbone.config))
            if own != theirs:
                raise ValueError(
                    f"{name}: the student was made for {own!r}, but {type(backbone).__name__} has {theirs!r}"
                )
        for name, own in _layers(self.adapters):
            sizes = own.lora_A[ADAPTER].in_features, own.lora_B[ADAPTER].out_features
            theirs = _sizes(backbone, name)
            if sizes != theirs:
                raise ValueError(
                    f"{name}: the student was made for a layer of sizes {sizes}, but {type(backbone).__name__} has "
                    f"{'none of that name' if theirs is None else theirs}"
                )

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Follows the backbone's device; its own parts have float32 at least, whatever the backbone's dtype."""
        self.to(device=backbone.device, dtype=torch.promote_types(backbone.dtype, torch.float32))
        adopt_special_ids(self.config, backbone)
        self._models = [_marks_of(backbone), self._joined(backbone)]

    def on_detach(self) -> None:
        """Lets go of the model around the backbone's tensors."""
        self._models = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`PTPForCausalLM.forward` of the attached backbone with this student."""
        return self.whole(*args, **kwargs)

    @property
    def generation_config(self) -> GenerationConfig:
        """The backbone's: trainers align special tokens with it, and `generate` of another model asks for it."""
        return self.backbone.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig | None) -> None:
        """Ignored: a student has none of its own."""

    def _supports_logits_to_keep(self) -> bool:
        """Asked by transformers where it would run the student itself."""
        raise RuntimeError("PTPStudent cannot assist this model: call student.attach(backbone) first")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> None:
        """A student has no embeddings of tokens.

        Raises:
            ValueError: Always.
        """
        raise ValueError("a PTPStudent has no embeddings of tokens: resize the backbone's, and make a new student")

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: everything but the backbone and what was made of it."""
        return super().__getstate__() | {"_models": []}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, _Up):
            nn.init.zeros_(module[ADAPTER].weight)


class _Up(nn.ModuleDict):
    """The B of a layer, which begins with zeros."""


def _adapters_like(backbone: nn.Module) -> nn.Module:
    """New A's and B's under the names of the adapted layers of a model."""
    root = nn.Module()
    for name, layer in _layers(backbone):
        place = root
        for part in name.split("."):
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        for kind, made in (("lora_A", nn.ModuleDict), ("lora_B", _Up)):
            weight = getattr(layer, kind)[ADAPTER].weight
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            place.add_module(kind, made({ADAPTER: linear}))
    return root


def _sizes(backbone: nn.Module, name: str) -> tuple[int, int] | None:
    """Features that a layer reads and writes; None where there is no such layer."""
    try:
        layer = backbone.get_submodule(name)
    except AttributeError:
        return None
    layer = getattr(layer, "base_layer", layer)
    if hasattr(layer, "in_features"):
        return layer.in_features, layer.out_features
    return tuple(layer.weight.shape)  # the Conv1D of GPT-2


def _copy(config: PreTrainedConfig) -> PreTrainedConfig:
    """A configuration of its own, which another model may change."""
    return type(config).from_dict(config.to_dict())


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and modules with gated adapters."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


def _marks_of(backbone: PreTrainedModel) -> tuple[Any, ...]:
    """What changes when the tensors of a backbone are replaced: moved, cast, resized, adapted."""
    backbone = unwrap(backbone)
    tensors = tuple((p.data_ptr(), p.dtype) for name, p in backbone.named_parameters() if "lora_" not in name)
    return tensors, backbone.config._attn_implementation, adapter_marks(backbone)
