"""Several drafters for one call: look-ups where they are confident, a model elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..attach import AttachableDrafter
from ..backbone.backbones import takes_dense_masks
from ..backbone.target import is_recurrent
from ..backbone.wrapped_models import Kwargs
from ..call.costs import BlockCosts
from ..call.options import CallOptions, DraftOptions
from ..call.sequences import Sequences, Speculation
from ..contract import (
    CacheView,
    DraftSession,
    DraftTree,
    PrefillOutput,
    TargetOutput,
    VerificationResult,
    joined_layers,
)
from ..trees.building import joined_chains
from ..trees.choice import chain_options
from ..trees.growth import tree_options
from ..verification.verifiers import Verifier

_START = 16.0  # tokens that count as expected and accepted before anything is known
_DECAY = 0.98  # of past counts remains after a cycle, so that a look-up that fails is tried again


class DrafterCascade(AttachableDrafter):
    """Several drafters in order: in every cycle the first that is confident drafts, and the last one where none is.

    The choice precedes every draw: all but the last drafter look their drafts up, so that these and their confidence
    follow from the text alone. To draw first and to choose or merge afterwards would change the output. Past acceptance
    corrects a look-up's expectation, in greedy calls or in sampled ones: sampled text repeats itself less often than
    its counts predict. With `joins`, a look-up that is not sure adds its draft to the last drafter's: its tokens come
    first, and are taken out of the last drafter's distributions.

    Args:
        drafters: At least two; those before the last are look-ups that tell how many tokens they expect to be accepted
            (`SuffixDrafter`).
        least: Tokens, per sequence, that a look-up must expect to be accepted.
        joins: Where none does, verify the first look-up's draft and the last drafter's chain in one tree.

    Example:
        >>> cascade = DrafterCascade([SuffixDrafter(), EagleHead.from_pretrained("eagle")]).attach(model)
        >>> out = model.generate(**inputs, assistant_model=cascade)
    """

    def __init__(self, drafters: Sequence[AttachableDrafter], least: float = 2.0, joins: bool = False) -> None:
        if len(drafters) < 2 or not all(isinstance(drafter, AttachableDrafter) for drafter in drafters):
            raise ValueError(f"drafters={drafters!r} must be at least two drafters that can be attached")
        if not least > 0:
            raise ValueError(f"least={least!r} must be positive")
        self.drafters, self.least, self.joins = list(drafters), least, joins
        self.last = self.drafters[-1]
        # of greedy and of sampled calls
        self.calibrations = [[LookupCalibration() for _ in self.drafters[:-1]] for _ in (False, True)]
        self.rules, self.drafts_trees = self.last.rules, self.last.drafts_trees
        self.reads_prompt = any(drafter.reads_prompt for drafter in drafters)
        self.own_options = frozenset[str]().union(*(drafter.own_options for drafter in drafters))

    @property
    def label(self) -> str:
        return f"{type(self).__name__} of {', '.join(drafter.label for drafter in self.drafters)}"

    @property
    def config(self) -> PreTrainedConfig:
        return self.backbone.config

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        for drafter in self.drafters:
            drafter.check_backbone(backbone)
        if self.joins and (is_recurrent(DynamicCache(config=backbone.config)) or not takes_dense_masks(backbone)):
            raise ValueError(f"joins=True verifies trees, and {type(backbone).__name__} takes chains alone")

    def on_attach(self, backbone: PreTrainedModel) -> None:
        for drafter in self.drafters:  # they stay attached when the cascade is detached
            drafter.attach(backbone)

    def longest_draft(self) -> int | None:
        longest = [drafter.longest_draft() for drafter in self.drafters]
        return None if None in longest else max(each or 0 for each in longest)

    def default_draft(self) -> int:
        return max(drafter.default_draft() for drafter in self.drafters)

    def parts(self) -> dict[str, nn.Module]:
        parts = ((index, each) for index, drafter in enumerate(self.drafters) for each in drafter.parts().items())
        return {f"{index}.{name}": part for index, (name, part) in parts}

    def obstacle(self, config: GenerationConfig, model_kwargs: Kwargs) -> str | None:
        return next(filter(None, (drafter.obstacle(config, model_kwargs) for drafter in self.drafters)), None)

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Request a tree where drafts are joined, so that there is room for one."""
        if self.joins and options.draft_tree is not None:
            raise ValueError(f"draft_tree={options.draft_tree!r}: with joins=True the last drafter's is a chain")
        options = super().prepare_call(options, config)
        size = 2 * (options.num_assistant_tokens or self.default_draft())
        return replace(options, draft_tree={"total_tokens": size}) if self.joins else options

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Complete the last drafter's tree, or chain; look-ups draft chains, which its depth does not bound."""
        prepared = self.last.prepare_tree(options, config)
        number, longest = prepared.num_assistant_tokens or 0, options.num_assistant_tokens or self.default_draft()
        tree = chain_options(number) if prepared.draft_tree is None else prepared.draft_tree
        return replace(prepared, num_assistant_tokens=max(longest, number), draft_tree=tree)

    def restore_point(self) -> Callable[[], None]:
        points = [drafter.restore_point() for drafter in self.drafters]

        def restore() -> None:
            for point in points:
                point()

        return restore

    def start(self, options: DraftOptions) -> CascadeSession:
        sessions = []
        for drafter in self.drafters:
            tree, number = None, drafter.default_draft()
            if drafter is self.last and options.draft_tree is not None and not self.joins:
                tree, number = tree_options(options.draft_tree, drafter.longest_draft())
            own = replace(options, num_assistant_tokens=min(options.num_tokens, number), draft_tree=tree)
            sessions.append(drafter.session(replace(own, schedule="constant") if self.joins else own))  # joins chains
        for drafter, session in zip(self.drafters, sessions):
            is_sure = drafter is self.last or session.expected is not None
            if session.lookahead or session.is_deterministic or not is_sure:
                reason = "drafts in the verifying call" if is_sure else "does not say what it expects before it draws"
                raise ValueError(f"drafters: {type(drafter).__name__} {reason}, and cannot be one of several so")
        return CascadeSession(sessions, self.calibrations[options.do_sample], self.least, self.joins)

    def cycle_costs(self, session: DraftSession, backbone: PreTrainedModel, block: BlockCosts) -> list[list[float]]:
        assert isinstance(session, CascadeSession)
        pairs = zip(self.drafters, session.sessions)
        return [costs for drafter, part in pairs for costs in drafter.cycle_costs(part, backbone, block)]

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        return self.last.make_verifier(options, cast(CascadeSession, session).sessions[-1])


class LookupCalibration:
    """How many tokens of a look-up's drafts are accepted for each that it expects, of late."""

    expected = accepted = 0.0

    @property
    def factor(self) -> float:
        return (_START + self.accepted) / (_START + self.expected)

    def note(self, expected: float = 0.0, accepted: float = 0.0) -> None:
        """Count a cycle; both numbers are 0 where another drafter drafted."""
        self.expected = _DECAY * self.expected + expected
        self.accepted = _DECAY * self.accepted + accepted


class CascadeSession(DraftSession):
    """The drafts of one call; see `DrafterCascade`. All sessions read all tokens, whoever drafted them."""

    def __init__(
        self, sessions: list[DraftSession], calibrations: list[LookupCalibration], least: float, joins: bool = False
    ) -> None:
        self.sessions, self.calibrations, self.least, self.joins = sessions, calibrations, least, joins
        self.chosen: int | None = None
        self.decided: int | None = None  # whose draft is next, where `kinds` has looked
        # two drafts at once are as long as they can be
        self.priors = [] if joins else [prior for session in sessions for prior in session.priors]
        self.num_tokens = max(session.num_tokens for session in sessions)
        self.reads_cache = any(session.reads_cache for session in sessions)
        self.hidden_layers = joined_layers(*(session.hidden_layers for session in sessions))

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.view = view
        for session in self.sessions:
            session.begin(outputs, view)

    def kinds(self, tokens: Sequences) -> list[int]:
        """Return the kinds of the drafts of the session that drafts next; see `propose`."""
        before = 0
        for index, session in enumerate(self.sessions):
            kinds = session.kinds(tokens)
            self.decided = index
            if session is self.sessions[-1] or self._expects(index):
                break
            before += len(session.priors)
        return [kind if kind < 0 else before + kind for kind in kinds]

    def _expects(self, index: int) -> bool:
        return (self.sessions[index].expected or 0.0) * self.calibrations[index].factor >= self.least

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return one session's draft, or two in one tree; the others get length 0, and read what comes before."""
        *sure, last = self.sessions
        decided, self.decided = self.decided, None
        chosen = guess = self.chosen = None
        for index, session in enumerate(sure):
            tree = session.propose(tokens, 0 if chosen is not None else min(length, session.num_tokens))
            is_next = self._expects(index) if decided is None else index == decided
            if chosen is None and length and is_next:
                chosen, self.chosen = tree, index
            elif self.joins and guess is None and tree.tokens.shape[1]:
                guess = tree
        tree = last.propose(tokens, 0 if chosen is not None else min(length, last.num_tokens))
        if chosen is not None:
            return chosen
        return tree if guess is None or not tree.tokens.shape[1] else joined_chains(guess, tree)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        accepted = [count - 1 for count in self.view.new_tokens.counts if count]
        for index, calibration in enumerate(self.calibrations):
            if index == self.chosen:
                calibration.note(self.sessions[index].expected or 0.0, sum(accepted) / max(1, len(accepted)))
            else:
                calibration.note()
        for session in self.sessions:
            session.advance(outputs, result)

    def finish(self, statistics: Speculation) -> None:
        for session in self.sessions:
            session.finish(statistics)

    def coverage(self, tokens: Tensor) -> float | None:
        return self.sessions[-1].coverage(tokens)
