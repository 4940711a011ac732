"""The base of all drafters: draft lengths, options, sessions and verifiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..configuration.heads import MTPHeadConfig
from ..configuration.loss_options import LossOptions
from .backbone.target import traits_of, weights_of
from .backbone.wrapped_models import Kwargs, training_size
from .call.costs import BlockCosts
from .call.options import CallOptions, DraftOptions, Sources
from .call.schedule import AdaptiveSchedule, ExpectedSchedule
from .contract import DraftSession, Recorder
from .tensors.tensor_files import Fields
from .trees.growth import DEEPEST, tree_options
from .verification.verifiers import GreedyVerifier, SampledVerifier, Verifier

logger = logging.get_logger(__name__)
# by drafter: a copy or a pickle chooses its own trees, for it may have another backbone or another machine
_TREE_CHOICES: WeakKeyDictionary[BaseDrafter, dict[bool, dict[str, int]]] = WeakKeyDictionary()
_SCHEDULES: WeakKeyDictionary[BaseDrafter, dict[Hashable, AdaptiveSchedule]] = WeakKeyDictionary()
_NAMED: WeakSet[BaseDrafter] = WeakSet()  # of these, users were told that their numbers are not finite
# the drafters that have an option in `CallOptions.extra`; the others are of parallel token prediction
_KINDS = {"draft_vocabulary": "sequential modules", "assistant_tokenizer": "AssistantDrafter", "scope": "SuffixDrafter"}
DRAFTERS: Kwargs = {}
"""The classes of drafters by name; each enters at the end of its file."""


class DrafterFacts(NamedTuple):
    """What a card says of a drafter."""

    kind: str  # "heads", "modules", "uniforms", "eagle" or "block"
    window: int  # the longest usual draft and one
    rows: list[tuple[str, str]]  # (label, value) of a table
    papers: tuple[str, ...]  # keys of entries in `citations.bib`, or entries


class BaseDrafter:
    """What a user holds: an attached head, or a model that drafts for itself; it makes the draft sessions of calls.

    Chains, verified by token or by block, are the default of every method; a class adds `start`.

    Attributes:
        rules: Names that `verification` may choose; the first is the default.
        window: Tokens that a call may yield: the next one, and one for each drafted token.
        drafts_trees: Whether the drafter takes `draft_tree`.
        drafts_at_once: Whether one forward of its own makes all tokens of a draft, as one of heads does.
        reads_prompt: Whether drafts need the ids of the prompt, in whose place a call may pass embeddings.
        is_apart: Whether it drafts for a backbone of the user's choice, and holds none.
        head_config: Options of its heads; None: it has none.
        loss_options: Options of its loss; None: it has none.
        mtp_loss_weight: lambda, what its loss is multiplied with beside that of a backbone; None: it learns alone.
        not_served: Why no engine runs it; None: one may.
        recorder: Records what its calls verify, so that it can learn; None: nothing does.
        own_options: Names of `CallOptions.extra` that it takes, beyond those that its `prepare_call` reads.
        tree_budgets: Of trees that need no other option, among which `"auto"` chooses; empty: of two usual shapes.
        totals: Sums over its calls (`Speculation.counts`), where somebody has begun to count.
    """

    rules: tuple[str, ...] = ("block", "token")
    window: int
    drafts_trees: bool = False
    drafts_at_once: bool = False
    reads_prompt: bool = True
    is_apart: bool = False
    head_config: MTPHeadConfig | None = None
    loss_options: LossOptions | None = None
    mtp_loss_weight: float | None = None
    not_served: str | None = "it is no DeepSeekMTP, MTPHeads, EagleHead or BlockDrafter, which can be exported"
    recorder: Recorder | None = None
    own_options: frozenset[str] = frozenset()
    tree_budgets: tuple[int, ...] = ()
    totals: Counter[str] | None = None

    def longest_draft(self) -> int | None:
        """Return the most tokens that a draft may have; None: any number.

        The first token of a window is the ordinary next token.
        """
        return max(self.window - 1, 0)

    def default_draft(self) -> int:
        """Return how many tokens are drafted where no option sets a number."""
        return self.longest_draft() or 0

    def verifier_model(self, backbone: PreTrainedModel) -> PreTrainedModel:
        """Return the model that runs the forwards of a call: on tokens it must compute what the backbone does."""
        return backbone

    def running(self, backbone: PreTrainedModel) -> AbstractContextManager[object]:
        """Return the context of the forwards of a call."""
        return nullcontext()

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that draft and do nothing else, by name; `"draft_layers"` adapt layers of the backbone."""
        return {"drafter": self} if isinstance(self, nn.Module) else {}

    @classmethod
    def facts(cls, config: PreTrainedConfig, drafter: object = None) -> DrafterFacts:
        """Return what a card says of drafters with a configuration, or of the very drafter where it is known."""
        raise TypeError(f"a {cls.__name__} has no card")

    def export_to(self, engine: str, folder: Path) -> Fields:
        """Write a drafter that stands apart for an engine.

        Return how that drafts with it: `method` and `num_speculative_tokens` of vLLM's `--speculative-config`.
        """
        raise ValueError(f"engine={engine!r} has no code for a {type(self).__name__}: {self.not_served}")

    @property
    def policy(self) -> PreTrainedModel:
        """The model whose text it drafts: itself, or what it is attached to."""
        return cast(PreTrainedModel, self)

    @property
    def tp_size(self) -> int | None:
        """Among how many processes the layers of its policy are divided, which trainers give the same rows; None: 1."""
        return training_size(self.policy, type(self).__name__) if isinstance(self, nn.Module) else None

    def obstacle(self, config: GenerationConfig, model_kwargs: Kwargs) -> str | None:
        """Return an obstacle to these drafts in a call, in the user's words; None: there is none."""
        return None

    def sampling_defaults(self, sources: Sources) -> Kwargs:
        """Return fields of the GenerationConfig and the values that they take where no source sets them."""
        return {}

    def assistant_config(self) -> GenerationConfig | None:
        """Return the generation config of a model that drafts, where transformers keeps its number of tokens."""
        return None

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Refuse options of other kinds of drafters, and complete a tree, whose longest path is the draft's length."""
        for name in sorted(options.extra.keys() - self.own_options):
            kind = _KINDS.get(name, "parallel token prediction")
            raise ValueError(f"{name}= is an option of {kind}, and {type(self).__name__} has none")
        if options.draft_tree is None:
            return options
        if not self.drafts_trees:
            tree = f"draft_tree={options.draft_tree!r}"
            raise ValueError(f"{tree}: {type(self).__name__} drafts chains only; leave it out")
        return self.prepare_tree(options, config)

    @property
    def tree_choices(self) -> dict[bool, dict[str, int]]:
        """The trees that `draft_tree="auto"` chose, of greedy (False) and sampled calls; empty it to choose again."""
        return _TREE_CHOICES.setdefault(self, {})

    @property
    def schedules(self) -> dict[Hashable, AdaptiveSchedule]:
        """What calls with `num_assistant_tokens_schedule="adaptive"` have learned; empty it to start over."""
        return _SCHEDULES.setdefault(self, {})

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Complete `draft_tree`; `"auto"` becomes the tree chosen before, or stays until the prompt is known."""
        tree, number, longest = options.draft_tree, options.num_assistant_tokens, self.longest_draft()
        if longest == 0:
            raise ValueError(f"draft_tree={tree!r}: this {type(self).__name__} drafts nothing; leave it out")
        tree = self.tree_choices.get(bool(config.do_sample), "auto") if tree == "auto" else tree
        if tree == "auto":
            return replace(options, num_assistant_tokens=number or longest or DEEPEST)
        tree, deepest = tree_options(tree, longest)
        return replace(options, draft_tree=tree, num_assistant_tokens=min(number or deepest, deepest))

    def restore_point(self) -> Callable[[], None]:
        """Return a function by which the drafter forgets the text that it has read since; most read none."""
        return lambda: None

    def start(self, options: DraftOptions) -> DraftSession:
        """Return the session of one call."""
        raise NotImplementedError

    def session(self, options: DraftOptions) -> DraftSession:
        """Return the session of one call, through the recorder if there is one."""
        session = self.start(options)
        return session if self.recorder is None else self.recorder.session(session)

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        """Return a greedy verifier where the call is greedy, else one of the call's rule."""
        if options.do_sample:
            return SampledVerifier(options.verification)
        return GreedyVerifier(options.may_exclude_all)

    @property
    def label(self) -> str:
        """The drafter's name in messages."""
        return type(self).__name__

    def warn_of_numbers(self) -> None:
        """Warn, once for every drafter, that its numbers are not finite, so that a call goes on without it."""
        if self not in _NAMED:
            _NAMED.add(self)
            logger.warning(
                f"{self.label} computes numbers that are not finite (NaN, or an overflow): calls go on without its "
                "drafts, and their text is the backbone's own; look for damaged weights, or use a wider dtype."
            )

    def cycle_costs(self, session: DraftSession, backbone: PreTrainedModel, block: BlockCosts) -> list[list[float]]:
        """Return what cycles cost by kind of drafts and length, in those of plain decoding, by weights that are read.

        The unembedding is read with the parts, unless they have one of their own.
        """
        parts, head = list(self.parts().values()), backbone.get_output_embeddings()
        own, size = weights_of(parts), max(traits_of(backbone).weights, 1)
        if own and isinstance(head, nn.Linear):
            drafted = len(getattr(self, "draft_vocabulary", None) or range(head.out_features))
            layers = (layer for part in parts for layer in part.modules() if isinstance(layer, nn.Linear))
            if all(layer.out_features not in (drafted, head.out_features) for layer in layers):
                own += drafted * head.in_features
        passes = (lambda _: 1) if self.head_config is not None else block if self.drafts_at_once else float
        lengths = range(1, session.num_tokens + 1)
        costs = [block(session.positions(n)) + passes(n) * own / size for n in lengths]
        return [[1.0, *costs]] * len(session.priors)

    def schedule_of(self, session: DraftSession, options: DraftOptions) -> AdaptiveSchedule | ExpectedSchedule | None:
        """Return what chooses the length of drafts; None: they are as long as they can be.

        A schedule by the clock begins with what earlier calls of the same kind learned. Every call has a copy of its
        own, remembered when it ends well, so that calls in several threads do not meet.
        """
        if options.schedule == "adaptive":
            known = self.schedules.get(_kind_of(session, options))
            return AdaptiveSchedule(session.num_tokens, session.lookahead) if known is None else known.resumed()
        if options.block is None or session.is_deterministic or not session.priors:
            return None
        costs = self.cycle_costs(session, options.backbone, options.block)
        return ExpectedSchedule(costs, session.priors, session.lookahead)

    def remember(self, schedule: object, session: DraftSession, options: DraftOptions) -> None:
        """Store what a call learned by the clock for later calls of the same kind."""
        if isinstance(schedule, AdaptiveSchedule):
            self.schedules[_kind_of(session, options)] = schedule


def _kind_of(session: DraftSession, options: DraftOptions) -> Hashable:
    """Return everything that the cost of a cycle depends on."""
    processors = tuple(type(processor).__name__ for processor in options.processors)
    drafts = session.num_tokens, session.lookahead, str(options.draft_tree)
    return len(options.prompt), options.do_sample, drafts, processors, options.cache
