"""What a user holds: models that draft for themselves, and drafters that are attached to a backbone.

`attach` lays a route on the backbone, an object in the place of its `generate`: a call with one of the attached
drafters as `assistant_model` goes through our loop, every other call is the backbone's own. The route is all that
changes. A copy or a pickle of a pair is a pair. Of the backbone alone it has no drafters; of a drafter, no backbone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from .. import __version__
from ..modeling.wrapped_models import drop_collectors, unwrap
from .call.options import CallOptions, DraftOptions
from .call.schedule import AdaptiveSchedule
from .generate import decoding, prepared_call
from .protocols import DraftSession, SpeculativeCache
from .target.backbones import check_backbone
from .trees.choice import DEEPEST
from .trees.growth import tree_options
from .verification.verifiers import GreedyVerifier, SampledVerifier, Verifier

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_TREE_CHOICES: WeakKeyDictionary[Any, dict[bool, dict[str, int]]] = WeakKeyDictionary()
"""By drafter: a copy or a pickle chooses its own trees, for another backbone or another machine may be below it."""
_SCHEDULES: WeakKeyDictionary[Any, dict[tuple[Any, ...], AdaptiveSchedule]] = WeakKeyDictionary()
"""By drafter, and by what decides over a cycle's cost: what adaptive calls have learned."""


class BaseDrafter:
    """What most drafters share: token and block verification, greedy and sampled.

    Attributes:
        window: Tokens that a call may yield: the next one, and one for each drafted token.
        drafts_trees: Whether the drafter takes `draft_tree`.
    """

    rules: tuple[str, ...] = ("block", "token")
    window: int
    drafts_trees: ClassVar[bool] = False

    def longest_draft(self) -> int | None:
        """Return window - 1: the first token of a window is the ordinary next token."""
        return max(self.window - 1, 0)

    def default_draft(self) -> int:
        """Return as many as a draft may have."""
        return self.longest_draft() or 0

    def runner(self, backbone: PreTrainedModel) -> PreTrainedModel:
        """Return the backbone itself."""
        return backbone

    def obstacle(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
        """Return None: nothing rules out these drafts."""
        return None

    def sampling_defaults(self, sources: tuple[Any, ...]) -> dict[str, Any]:
        """Return none: transformers' own apply."""
        return {}

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Refuse options of other kinds of drafters, and complete a tree, whose longest path is the draft's length.

        Raises:
            ValueError: An option that this kind does not have, or a tree that cannot be.
        """
        for name in options.extra:
            kind = "sequential modules" if name == "draft_vocabulary" else "parallel token prediction"
            raise ValueError(f"{name}= is an option of {kind}, and {type(self).__name__} has none")
        if options.draft_tree is None:
            return options
        if not self.drafts_trees:
            raise ValueError(
                f"draft_tree={options.draft_tree!r}: {type(self).__name__} drafts chains only; leave it out"
            )
        return self.prepare_tree(options, config)

    @property
    def tree_choices(self) -> dict[bool, dict[str, int]]:
        """The trees that `draft_tree="auto"` chose, of greedy (False) and of sampled calls; empty it to choose anew."""
        return _TREE_CHOICES.setdefault(self, {})

    @property
    def schedules(self) -> dict[tuple[Any, ...], AdaptiveSchedule]:
        """What calls with `num_assistant_tokens_schedule="adaptive"` have learned; empty it to begin anew."""
        return _SCHEDULES.setdefault(self, {})

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Validate and complete `draft_tree`; `"auto"` is what was chosen before, or stays until the prompt is known.

        Raises:
            ValueError: A tree that cannot be, or that is deeper than the drafter.
        """
        tree, number, longest = options.draft_tree, options.num_assistant_tokens, self.longest_draft()
        if longest == 0:
            raise ValueError(f"draft_tree={tree!r}: this {type(self).__name__} drafts nothing; leave it out")
        if tree == "auto":
            tree = self.tree_choices.get(bool(config.do_sample), "auto")
        if tree == "auto":
            return replace(options, num_assistant_tokens=number or longest or DEEPEST)
        tree, deepest = tree_options(tree, longest)
        return replace(options, draft_tree=tree, num_assistant_tokens=min(number or deepest, deepest))

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        """Return a greedy verifier where the call is greedy, else one of the rule that was asked for."""
        return SampledVerifier(options.verification) if options.do_sample else GreedyVerifier()

    def schedule_of(self, session: DraftSession, options: DraftOptions) -> AdaptiveSchedule:
        """Return a schedule that begins with what earlier calls of the same kind learned.

        Short calls would otherwise pay for trials of lengths that are known not to pay. Every call has a copy of its
        own, which is remembered when the call ends well, so that calls in several threads do not meet.
        """
        known = self.schedules.get(_kind_of(session, options))
        return AdaptiveSchedule(session.num_tokens, session.lookahead) if known is None else known.resumed()

    def remember(self, schedule: AdaptiveSchedule, session: DraftSession, options: DraftOptions) -> None:
        """Keep what a call learned for later calls of the same kind."""
        self.schedules[_kind_of(session, options)] = schedule


def _kind_of(session: DraftSession, options: DraftOptions) -> tuple[Any, ...]:
    """Return what decides over the cost of a cycle."""
    processors = tuple(type(processor).__name__ for processor in options.processing.processors)
    return (
        len(options.prompt), options.do_sample, session.num_tokens, session.lookahead, str(options.draft_tree),
        processors,
    )  # fmt: skip


class MTPGenerationMixin(BaseDrafter, GenerationMixin):
    """Adds lossless speculation to the `generate` of a model that drafts for itself.

    The model offers `window` and `start`, a forward that takes `output_hidden_states=-1`, and `own_cache` where its
    cache is of its own kind. `generate` gains:

    - `use_mtp`: None (on where possible), True (on, or an error that says why not), False (one token at a time);
    - `num_assistant_tokens`: tokens to draft, at most window - 1, which is the default;
    - `num_assistant_tokens_schedule="adaptive"`: drafts as many as pay, up to that bound, none where none pays;
    - `verification`: `"block"` (default) or `"token"`, for sampled drafts.

    A logits processor that must be called once for every token says so by an attribute `counts_calls = True`: the call
    then decodes plainly.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' `generate`, with the options above."""
        drafter = self if kwargs.get("assistant_model") is None else None
        call = prepared_call(super().generate, self, drafter, args, kwargs, self.own_cache())
        with decoding(self):
            return super().generate(**call)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: continuous batching has a loop of its own, which would not speculate.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__} does not offer generate_batch (continuous batching); use generate, which takes "
            "batches of any size"
        )

    def own_cache(self) -> Callable[[], SpeculativeCache] | None:
        """Return what makes the model's own kind of cache; None: it has caches of transformers."""
        return None


class AttachableDrafter(BaseDrafter):
    """A drafter for a backbone of its own choice.

    A class that uses it sets `window`, offers `start`, and may check the backbone in `check_backbone` and take what it
    needs of it in `on_attach`.
    """

    @property
    def _backbones(self) -> list[PreTrainedModel]:
        """The backbone, in a list, so that it is no submodule and is never saved."""
        return vars(self).setdefault("_backbones", [])

    @_backbones.setter
    def _backbones(self, value: list[PreTrainedModel]) -> None:
        vars(self)["_backbones"] = value

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
        return state | {"_backbones": [], "backbone_tie": Route.of(self.backbone).tie if self.is_attached else Tie()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to the copy of the backbone, where there is one in the same copy or pickle."""
        tie = state.pop("backbone_tie", Tie())
        parent = getattr(super(), "__setstate__", self.__dict__.update)
        parent(state)
        tie.drafters.append(self)
        self._backbones = [tie.backbone] if tie.backbone is not None else []


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
            f"{name} generates nothing: call attach(backbone), then backbone.generate(..., assistant_model=...); "
            "MTPSFTTrainer trains it"
        )


class Tie:
    """What a backbone and its drafters have in common: in one copy or pickle they find each other by its copy."""

    def __init__(self) -> None:
        self.backbone: PreTrainedModel | None = None
        self.drafters: list[AttachableDrafter] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Tie, ()


class Route:
    """Stands on a backbone before the `generate` of its class.

    Args:
        backbone: The model.
        tie: What its drafters know of it.
        vocab_size: Of the backbone when the route was laid.

    Attributes:
        drafters: What is attached to it.
        version: Of this code: drafters of several directories, each with its own copy of the code, share one route.
    """

    version = __version__

    def __init__(self, backbone: PreTrainedModel, tie: Tie, vocab_size: int) -> None:
        self.backbone, self.tie, self.vocab_size = backbone, tie, vocab_size
        tie.backbone, self.drafters = backbone, tie.drafters
        for drafter in self.drafters:  # of a copy or a pickle, and made before the backbone
            drafter._backbones = [backbone]

    @classmethod
    def of(cls, backbone: PreTrainedModel) -> Route:
        """The route of a backbone, laid where there is none."""
        route = vars(backbone).get("generate")
        # also a route of another copy of this code, that came with a directory
        version = getattr(route, "version", None)
        if version not in (None, cls.version):
            raise RuntimeError(
                f"{type(backbone).__name__} has drafters of tokenahead {version}, and this one is of {cls.version}: "
                "detach() those first"
            )
        if version is not None:
            return cast(Route, route)
        route = cls(backbone, Tie(), backbone.config.get_text_config().vocab_size)
        # pickle and copy ask the instance, too
        vars(backbone).update(generate=route, __getstate__=route.state)
        return route

    def remove(self, drafter: AttachableDrafter) -> None:
        """Takes a drafter off, and the route with the last one."""
        self.drafters[:] = [other for other in self.drafters if other is not drafter]
        if not self.drafters:
            drop_collectors(self.backbone)
            del self.backbone.generate, self.backbone.__getstate__

    def state(self) -> dict[str, Any]:
        """What a copy or a pickle of the backbone holds, without what transformers leaves where states are read."""
        drop_collectors(self.backbone)
        return vars(self.backbone)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `backbone.generate`."""
        backbone = self.backbone
        generate = partial(type(backbone).generate, backbone)
        assistant = self._drafter_of(kwargs.get("assistant_model"))
        if getattr(assistant, "is_attached", None) is None:  # also a drafter of code that came with a directory has it
            return generate(*args, **kwargs)
        self._check(assistant)
        kwargs.pop("assistant_model")
        call = prepared_call(generate, backbone, assistant, args, kwargs)
        with decoding(backbone):
            return generate(**call)

    def _drafter_of(self, assistant: Any) -> Any:
        """Return the drafter that an assistant became when it was attached; other assistants unchanged."""
        return next((drafter for drafter in self.drafters if drafter.matches(assistant)), assistant)

    def _check(self, assistant: AttachableDrafter) -> None:
        if not any(drafter is assistant for drafter in self.drafters):
            raise RuntimeError(
                f"this {type(assistant).__name__} is not attached to this {type(self.backbone).__name__} (copies are "
                "not): call attach(backbone) first"
            )
        if self.backbone.config.get_text_config().vocab_size != self.vocab_size:  # resized since
            assistant.check_backbone(self.backbone)

    def __deepcopy__(self, memo: dict[int, Any]) -> Route:
        return Route(memo.get(id(self.backbone), self.backbone), deepcopy(self.tie, memo), self.vocab_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return Route, (self.backbone, self.tie, self.vocab_size)


def adopt_special_ids(config: Any, backbone: PreTrainedModel) -> None:
    """Gives a drafter's config the backbone's special ids: `pipeline` compares them."""
    for name in _SPECIAL:
        setattr(config, name, getattr(backbone.config.get_text_config(), name, None))
