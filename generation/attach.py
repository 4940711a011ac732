"""Drafters that are attached to a backbone which knows nothing of them, and that `generate` takes as `assistant_model`.

`attach` lays a route on the backbone, an object in the place of its `generate`: a call with one of the attached
drafters goes through our loop, every other call is the backbone's own. The route is all that changes. A copy or a
pickle of the backbone has a route without drafters; a copy of a drafter is detached.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator

from .. import __version__
from ..modeling.copies import drop_collectors
from ..modeling.unwrapping import unwrap
from .candidates import candidate_generator
from .generate import speculate
from .protocols import DrafterMixin
from .target.backbones import check_backbone

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class AttachableDrafter(DrafterMixin):
    """A drafter for a backbone of its own choice.

    A class that uses it sets `_backbones = []` before anything else, offers `start`, and may check the backbone
    in `check_backbone` and take over what it needs in `on_attach` and `on_detach`.
    """

    _backbones: list[PreTrainedModel]  # in a list, so that it is no submodule and is never saved

    @property
    def backbone(self) -> PreTrainedModel:
        """The model that it drafts for.

        Raises:
            RuntimeError: It is not attached.
        """
        if not self._backbones:
            raise RuntimeError(f"this {type(self).__name__} is not attached: call attach(backbone) first")
        return self._backbones[0]

    @property
    def is_attached(self) -> bool:
        """Whether there is a backbone."""
        return bool(self._backbones)

    def matches(self, model: Any) -> bool:
        """Whether `generate` may be given that model in the place of this drafter."""
        return False

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuses a backbone that cannot be drafted for."""

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Takes over what drafting needs of the backbone."""

    def on_detach(self) -> None:
        """Lets go of it."""

    def attach(self, backbone: PreTrainedModel) -> Any:
        """Makes `backbone.generate` accept this drafter as `assistant_model`; nothing else about it changes.

        Args:
            backbone: Any causal language model of transformers; of a PeftModel or a compiled model, the model within.

        Returns:
            The drafter itself.

        Raises:
            TypeError: No model of transformers.
            ValueError: A backbone that does not fit.
            RuntimeError: The drafter is attached to another model.
        """
        backbone = unwrap(backbone)
        check_backbone(backbone)
        self.check_backbone(backbone)
        if self._backbones and self._backbones[0] is not backbone:
            raise RuntimeError(
                f"this {type(self).__name__} is attached to another {type(self.backbone).__name__}: detach() it first"
            )
        if not self._backbones:
            self._backbones.append(backbone)
            for learned in (self.tree_choices, self.schedules):  # what pays depends on the backbone
                learned.clear()
            self.on_attach(backbone)
            Route.of(backbone).drafters.append(self)
        return self

    def detach(self) -> Any:
        """Undoes `attach`: the backbone is bit for bit what it was. Returns the drafter itself."""
        if self._backbones:
            Route.of(self.backbone).remove(self)
            self._backbones.clear()
            self.on_detach()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: everything but the backbone."""
        parent = getattr(super(), "__getstate__", None)
        state = dict(parent() if parent else self.__dict__)
        return state | {"_backbones": []}


class NoGenerationMixin:
    """`generate` of a drafter that has none, and would be asked to where it assists a model that it is not attached to.

    The name is looked at: Auto classes add transformers' `GenerationMixin` to a class of foreign code that has a
    `generate` and no base called so.
    """

    @classmethod
    def can_generate(cls) -> bool:
        """No, in spite of the name above."""
        return False

    def generate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing.

        Raises:
            RuntimeError: Always.
        """
        name = type(self).__name__
        raise RuntimeError(
            f"{name} generates nothing: call attach(backbone), then backbone.generate(..., assistant_model=...)"
        )


class Route:
    """Stands on a backbone before the `generate` of its class.

    Args:
        backbone: The model.

    Attributes:
        drafters: What is attached to it.
        version: Of this code: drafters of several directories, each with its own copy of the code, share one route.
    """

    version = __version__

    def __init__(self, backbone: PreTrainedModel) -> None:
        self.backbone, self.drafters = backbone, []

    @classmethod
    def of(cls, backbone: PreTrainedModel) -> Route:
        """The route of a backbone, laid where there is none."""
        route = vars(backbone).get("generate")
        version = getattr(
            route, "version", None
        )  # also a route of another copy of this code, that came with a directory
        if version not in (None, cls.version):
            raise RuntimeError(
                f"{type(backbone).__name__} has drafters of tokenahead {version}, and this one is of {cls.version}: "
                "detach() those first"
            )
        if version is None:
            route = cls(backbone)
            backbone.generate, backbone._get_candidate_generator = route, route.candidates
            backbone.__getstate__ = route.state  # pickle and copy ask the instance, too
        return route

    def remove(self, drafter: AttachableDrafter) -> None:
        """Takes a drafter off, and the route with the last one."""
        self.drafters = [other for other in self.drafters if other is not drafter]
        if not self.drafters:
            drop_collectors(self.backbone)
            del self.backbone.generate, self.backbone._get_candidate_generator, self.backbone.__getstate__

    def state(self) -> dict[str, Any]:
        """What a copy or a pickle of the backbone holds, without what transformers leaves where states are read."""
        drop_collectors(self.backbone)
        return vars(self.backbone)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`backbone.generate`."""
        assistant = self._drafter_of(kwargs.get("assistant_model"))
        if not _is_drafter(assistant):
            return type(self.backbone).generate(self.backbone, *args, **kwargs)
        self._check(assistant)
        kwargs.pop("assistant_model")
        return speculate(self.backbone, assistant, args, kwargs)

    def _drafter_of(self, assistant: Any) -> Any:
        """What a model became when it was attached as a whole (a PTPForCausalLM, say); other assistants as they are."""
        known = (drafter for drafter in self.drafters if getattr(drafter, "matches", _nobody)(assistant))
        return next(known, assistant)

    def candidates(
        self,
        generation_config: Any,
        input_ids: torch.Tensor,
        inputs_tensor: torch.Tensor | None,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        assistant_model: Any = None,
        **kwargs: Any,
    ) -> CandidateGenerator:
        """`backbone._get_candidate_generator`, for transformers' own assisted loop."""
        common = generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs
        assistant_model = self._drafter_of(assistant_model)
        if not _is_drafter(assistant_model):
            of_class = type(self.backbone)._get_candidate_generator
            return of_class(self.backbone, *common, assistant_model=assistant_model, **kwargs)
        self._check(assistant_model)
        return candidate_generator(
            assistant_model, self.backbone, generation_config, logits_processor, model_kwargs, input_ids
        )

    def _check(self, assistant: AttachableDrafter) -> None:
        if not any(drafter is assistant for drafter in self.drafters):
            raise RuntimeError(
                f"this {type(assistant).__name__} is not attached to this {type(self.backbone).__name__} (copies are "
                "not): call attach(backbone) first"
            )
        assistant.check_backbone(self.backbone)  # whose vocabulary may have been resized since

    def __deepcopy__(self, memo: dict[int, Any]) -> Route:
        return Route(memo.get(id(self.backbone), self.backbone))

    def __reduce__(self) -> tuple[Any, ...]:
        return Route, (self.backbone,)


def _nobody(model: Any) -> bool:
    """`matches` of a drafter whose code, which came with a directory, does not know it."""
    return False


def _is_drafter(assistant: Any) -> bool:
    """Whether it is an `AttachableDrafter`, of this copy of the code or of one that came with a directory."""
    return isinstance(assistant, AttachableDrafter) or all(hasattr(assistant, n) for n in ("start", "is_attached"))


def adopt_special_ids(config: Any, backbone: PreTrainedModel) -> None:
    """Gives a drafter's config the backbone's special ids: `pipeline` compares them."""
    for name in _SPECIAL:
        setattr(config, name, getattr(backbone.config.get_text_config(), name, None))
