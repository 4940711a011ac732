"""What a user holds: models that draft for themselves, and drafters that are attached to a backbone.

`attach` lays a patch on the backbone, an object in the place of its `generate`: a call with one of the attached
drafters as `assistant_model` goes through our loop, every other call is the backbone's own. Nothing else changes. A
copy or a pickle of a pair is a pair. Of the backbone alone it has no drafters; of a drafter, no backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .. import __version__
from ..configuration.fields import field
from .backbone.backbones import check_model
from .backbone.wrapped_models import Kwargs, drop_collectors, fingerprint, own_cache_of, same_backbone, unwrap
from .call.options import first_set
from .contract import SpeculativeCache
from .drafter import BaseDrafter
from .generate import decoding, prepared_call

logger = logging.get_logger(__name__)
D = TypeVar("D", bound="AttachableDrafter")


class MTPGenerationMixin(BaseDrafter, GenerationMixin):
    """Adds lossless speculation to the `generate` of a model that drafts for itself.

    The model offers `window` and `start`, a forward that takes `output_hidden_states=-1`, and `own_cache` where it
    has its own class of cache. `generate` gains:

    - `use_mtp`: None (on where possible), True (on, or an error with the reason), False (one token at a time);
    - `num_assistant_tokens`: tokens to draft, at most window - 1, which is the default;
    - `num_assistant_tokens_schedule`: `"constant"`, or as many as pay, by known costs (`"expected"`) or the clock
      (`"adaptive"`);
    - `verification`: `"block"` (default) or `"token"`, for sampled drafts.

    A logits processor with a state that its calls move on is called once for every token, and the call decodes plainly.
    An attribute `counts_calls` of a processor says whether it has one; else that is found out.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' `generate`, with the options above."""
        drafter = self if _checked(kwargs.get("assistant_model")) is None else None
        with decoding(self):
            return super().generate(**prepared_call(super().generate, self, drafter, args, kwargs, self.own_cache()))

    def generate_batch(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a ValueError: continuous batching has its own loop, which would not speculate."""
        raise ValueError(f"{type(self).__name__} does not offer generate_batch (continuous batching); use generate")

    def own_cache(self) -> Callable[[], SpeculativeCache] | None:
        """Return the constructor of the model's own class of cache; None: it has caches of transformers."""
        return None


class AttachableDrafter(BaseDrafter):
    """A drafter for a backbone of the user's choice.

    A class that uses it sets `window`, offers `start`, and may override `check_backbone` and `on_attach`.
    """

    is_apart = True

    @property
    def policy(self) -> PreTrainedModel:
        return self.backbone

    @property
    def _backbones(self) -> list[PreTrainedModel]:
        """The backbone, in a list, so that it is no submodule and is never saved."""
        return vars(self).setdefault("_backbones", [])

    @_backbones.setter
    def _backbones(self, value: list[PreTrainedModel]) -> None:
        vars(self)["_backbones"] = value

    @property
    def backbone(self) -> PreTrainedModel:
        """The model that it drafts for; a RuntimeError says that there is none."""
        if not self._backbones:
            raise RuntimeError(f"this {type(self).__name__} is not attached: call attach(backbone) first")
        return self._backbones[0]

    @property
    def is_attached(self) -> bool:
        """Whether there is a backbone."""
        return bool(self._backbones)

    @property
    def device(self) -> torch.device:
        """That of a drafter that is a module; transformers' own loop asks any other first of all, and gets an error."""
        if (device := getattr(super(), "device", None)) is None:
            raise RuntimeError(f"this {type(self).__name__} cannot assist this model: call attach(backbone) first")
        return device

    @property
    def generation_config(self) -> GenerationConfig:
        """The backbone's, which trainers and `generate` of another model read."""
        return self.backbone.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig | None) -> None:
        """Ignore the value."""

    def _supports_logits_to_keep(self) -> bool:
        """Raise an error: transformers itself would run a module with a model that it is not attached to."""
        raise RuntimeError(f"{type(self).__name__} cannot assist this model: call attach(backbone) first")

    def resize_token_embeddings(self, *args: object, **kwargs: object) -> nn.Module:
        """Raise a ValueError: a drafter that was made for one vocabulary fits no other."""
        drafter = f"{type(self).__name__} for vocab_size={field(getattr(self, 'config', None), 'vocab_size')}"
        raise ValueError(f"a {drafter} cannot be resized: resize its backbone, and make a new one")

    def matches(self, model: object) -> bool:
        """Return whether `generate` may take that model as `assistant_model` for this drafter."""
        return False

    def made_for(self) -> Mapping[str, object]:
        """Return the fields that the configuration of every backbone must have, by name."""
        return {}

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuse a backbone that cannot be drafted for: here, one with other fields than the drafter was made for."""
        drafter, other = type(self).__name__, type(backbone).__name__
        for name, wanted in self.made_for().items():
            if (actual := field(backbone.config.get_text_config(), name)) != wanted:
                raise ValueError(f"{name}: this {drafter} was made for {wanted!r}, but {other} has {actual!r}")

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Take from the backbone what drafting needs."""

    def on_detach(self) -> None:
        """Release it."""

    def attach(self: D, backbone: PreTrainedModel, default: bool = False) -> D:
        """Make `backbone.generate` accept this drafter as `assistant_model`, and return the drafter.

        Args:
            backbone: Any causal language model of transformers; of a PeftModel or a compiled model, the model within.
            default: It also drafts where a call names no `assistant_model`, as pipelines, trainers and evaluation
                harnesses do; the last drafter that was attached so does.
        """
        backbone = unwrap(backbone)
        check_model(backbone)
        self.check_backbone(backbone)
        if self._backbones and self._backbones[0] is not backbone:
            name, other = type(self).__name__, type(self.backbone).__name__
            raise RuntimeError(f"this {name} is attached to another {other}: detach() it first")
        if not self._backbones:
            self._backbones.append(backbone)
            for learned in (self.tree_choices, self.schedules):  # what pays depends on the backbone
                learned.clear()
            self.on_attach(backbone)
            recorded = field(getattr(self, "config", None), "backbone_fingerprint")
            actual = None if recorded is None else fingerprint(backbone)
            if recorded is not None and actual is not None and not same_backbone(recorded, actual):
                logger.warning(
                    f"this {type(self).__name__} learned on a backbone of backbone_fingerprint={recorded!r}, and this "
                    f"{type(backbone).__name__} has {actual!r}: texts stay right, but fewer drafts may be accepted"
                )
            GeneratePatch.of(backbone).drafters.append(self)
        if default:
            GeneratePatch.of(backbone).default = self
        return self

    def detach(self: D) -> D:
        """Undo `attach`: the backbone is bit for bit as before. Return the drafter itself."""
        if self._backbones:
            GeneratePatch.of(self.backbone).remove(self)
            self._backbones.clear()
            self.on_detach()
        return self

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a copy or a pickle: everything but the backbone."""
        parent = getattr(super(), "__getstate__", None)
        state = dict(parent() if parent else self.__dict__)
        state.pop("recorder", None)
        link = GeneratePatch.of(self.backbone).link if self.is_attached else CopyLink()
        return state | {"_backbones": [], "backbone_link": link}

    def __setstate__(self, state: Kwargs) -> None:
        """Attach to the copy of the backbone, where there is one in the same copy or pickle."""
        link = state.pop("backbone_link", CopyLink())
        parent = getattr(super(), "__setstate__", self.__dict__.update)
        parent(state)
        link.drafters.append(self)
        self._backbones = [link.backbone] if link.backbone is not None else []


class NoGenerationMixin:
    """Refuses `generate` of a drafter, which is called where it assists a model that it is not attached to.

    The name matters: Auto classes add transformers' `GenerationMixin` to a class of foreign code that has a `generate`
    and no base with such a name.
    """

    @classmethod
    def can_generate(cls) -> bool:
        """Return False, in spite of the name above."""
        return False

    def generate(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a RuntimeError."""
        call = "call attach(backbone), then backbone.generate(..., assistant_model=...)"
        raise RuntimeError(f"{type(self).__name__} generates nothing: {call}; MTPSFTTrainer trains it")


class CopyLink:
    """The link between a backbone and its drafters: in one copy or pickle they find each other by its copy."""

    def __init__(self) -> None:
        self.backbone: PreTrainedModel | None = None
        self.drafters: list[AttachableDrafter] = []

    def __reduce__(self) -> tuple[type[CopyLink], tuple[()]]:
        return CopyLink, ()


class GeneratePatch:
    """Replaces the `generate` of a backbone, whose vocabulary had `vocab_size` ids when the patch was laid."""

    version = __version__  # drafters of several directories, each with its own copy of the code, share one patch
    default: AttachableDrafter | None = None  # the one that drafts where a call names none

    def __init__(self, backbone: PreTrainedModel, link: CopyLink, vocab_size: int) -> None:
        self.backbone, self.link, self.vocab_size = backbone, link, vocab_size
        self.new_cache = own_cache_of(backbone)
        link.backbone, self.drafters = backbone, link.drafters
        for drafter in self.drafters:  # of a copy or a pickle, and made before the backbone
            drafter._backbones = [backbone]

    @classmethod
    def of(cls, backbone: PreTrainedModel) -> GeneratePatch:
        """Return the patch of a backbone, laid where there is none."""
        patch = vars(backbone).get("generate")
        # also a patch of another copy of this code, that came with a directory
        version = getattr(patch, "version", None)
        if version not in (None, cls.version):
            name = type(backbone).__name__
            raise RuntimeError(f"{name} has drafters of tokenahead {version}, not {cls.version}: detach() those first")
        if version is not None:
            return cast(GeneratePatch, patch)
        patch = cls(backbone, CopyLink(), backbone.config.get_text_config().vocab_size)
        # pickle and copy ask the instance, too
        vars(backbone).update(generate=patch, __getstate__=patch.state, _validate_generation_mode=patch.validate)
        return patch

    def remove(self, drafter: AttachableDrafter) -> None:
        """Remove a drafter, and the patch with the last one."""
        self.drafters[:] = [other for other in self.drafters if other is not drafter]
        self.default = None if self.default is drafter else self.default
        if not self.drafters:
            drop_collectors(self.backbone)
            del self.backbone.generate, self.backbone.__getstate__, self.backbone._validate_generation_mode

    def state(self) -> dict[str, object]:
        """Return the state of a copy or a pickle of the backbone, without transformers' hooks that collect states."""
        drop_collectors(self.backbone)
        return vars(self.backbone)

    def validate(self, mode: object, config: object, call: Kwargs) -> None:
        """Raise a RuntimeError where a drafter in transformers' own loop was attached by an argument of the call."""
        is_adapted = "_get_candidate_generator" in vars(self.backbone)  # by `candidate_generator`, for that loop
        if getattr(assistant := call.get("assistant_model"), "is_attached", None) is not None and not is_adapted:
            name = type(assistant).__name__
            raise RuntimeError(f"this {name} was attached within the call: call attach(backbone) before generate(...)")
        type(self.backbone)._validate_generation_mode(self.backbone, mode, config, call)

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Call `backbone.generate`."""
        backbone = self.backbone
        generate = partial(type(backbone).generate, backbone)
        assistant = _checked(kwargs.get("assistant_model"))
        if assistant is None:
            assistant = self._unnamed(kwargs)
        else:  # or the drafter that it became when it was attached
            assistant = next((drafter for drafter in self.drafters if drafter.matches(assistant)), assistant)
        if getattr(assistant, "is_attached", None) is None:  # also a drafter of code that came with a directory has it
            return generate(*args, **kwargs)
        drafter = cast(AttachableDrafter, assistant)
        with decoding(backbone, *drafter.parts().values()):
            if not any(each is drafter for each in self.drafters):
                name, own = type(drafter).__name__, type(backbone).__name__
                raise RuntimeError(f"this {name} is not attached to this {own} (copies are not): call attach(backbone)")
            if backbone.config.get_text_config().vocab_size != self.vocab_size:  # resized since
                drafter.check_backbone(backbone)
            return generate(**prepared_call(generate, backbone, drafter, args, kwargs, self.new_cache))

    def _unnamed(self, kwargs: Kwargs) -> AttachableDrafter | None:
        """Return the drafter of a call that names no assistant; a ValueError where `use_mtp=True` demands one."""
        sources = (kwargs, kwargs.get("generation_config"), self.backbone.generation_config)
        if self.default is not None or not self.drafters:
            # in transformers' own assisted loop the backbone drafts itself, one token at a time
            return None if first_set("is_assistant", sources[1:]) else self.default
        config = self.backbone.config.get_text_config()
        has_own_drafts = isinstance(self.backbone, BaseDrafter) or field(config, "num_mtp_layers") is not None
        if first_set("use_mtp", sources) and not (has_own_drafts or first_set("prompt_lookup_num_tokens", sources)):
            names = ", ".join(type(drafter).__name__ for drafter in self.drafters)
            how = f"pass {names} as assistant_model=, or call attach(backbone, default=True)"
            raise ValueError(f"use_mtp=True names no drafter, and {type(self.backbone).__name__} has none: {how}")
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> GeneratePatch:
        return GeneratePatch(memo.get(id(self.backbone), self.backbone), deepcopy(self.link, memo), self.vocab_size)

    def __reduce__(self) -> tuple[type[GeneratePatch], tuple[PreTrainedModel, CopyLink, int]]:
        return GeneratePatch, (self.backbone, self.link, self.vocab_size)


def _checked(assistant: object) -> object:
    """Return an `assistant_model`; a TypeError of a path, say, which pipelines load and `generate` does not."""
    if assistant is None or isinstance(assistant, (BaseDrafter, nn.Module)) or hasattr(type(assistant), "is_attached"):
        return assistant
    loaded = "AssistantDrafter.from_pretrained(path).attach(model)"
    raise TypeError(f"assistant_model={assistant!r} must be an attached drafter, or a model: load one, as by {loaded}")


def adopt_fields(config: PreTrainedConfig, backbone: PreTrainedModel) -> None:
    """Copy what others read of a drafter's config: special ids (`pipeline`), and how layers are divided (`Trainer`)."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(backbone.config.get_text_config(), name, None))
    config.distributed_config = field(backbone.config, "distributed_config")
