"""Several drafters for one call: look-ups where they are confident, a model elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ..attach import AttachableDrafter
from ..call.options import CallOptions, DraftOptions
from ..call.outputs import Speculation
from ..call.sequences import Sequences
from ..protocols import CacheView, DraftSession, joined_layers
from ..target.backbones import takes_dense_masks
from ..target.target import TargetOutput, is_recurrent
from ..trees.building import joined_chains
from ..trees.contract import DraftTree, VerificationResult
from ..verification.verifiers import Verifier


class DrafterCascade(AttachableDrafter):
    """In every cycle the first drafter that is confident drafts, and the last one where none is.

    Who drafts is decided before anything is drawn: all but the last must look their drafts up, so that these and how
    sure they are follow from the text alone. To draw first and to choose or merge afterwards would change the text.
    What a look-up expects is corrected by what came of its drafts so far, in greedy calls or in sampled ones: sampled
    text repeats itself less often than counts of it say.
    With `joins`, a look-up that is not sure adds its draft to the last one's: its tokens come first, and are taken out
    of what the last drafter's are verified by.

    Args:
        drafters: At least two; those before the last are look-ups that say how many tokens they expect to be accepted
            (`SuffixDrafter`).
        least: Tokens, per sequence, that a look-up must expect to be accepted.
        joins: Where none does, verify the first look-up's draft and the last drafter's chain in one tree.

    Raises:
        ValueError: Fewer than two drafters, or a number that is not positive.

    Example:
        >>> cascade = DrafterCascade([SuffixDrafter(), EagleHead.from_pretrained("eagle")]).attach(model)
        >>> out = model.generate(**inputs, assistant_model=cascade)
    """

    def __init__(self, drafters: Sequence[AttachableDrafter], least: float = 2.0, joins: bool = False) -> None:
        if len(drafters) < 2 or not all(isinstance(drafter, AttachableDrafter) for drafter in drafters):
            raise ValueError(f"drafters={drafters!r} must be at least two drafters that can be attached")
        if not least > 0:
            raise ValueError(f"least={least!r} must be positive")
        self._backbones = []
        self.drafters, self.least, self.joins = list(drafters), least, joins
        self.last = self.drafters[-1]
        self.trusts = [[Trust() for _ in self.drafters[:-1]] for _ in (False, True)]  # of greedy and of sampled calls
        self.rules, self.drafts_trees = self.last.rules, self.last.drafts_trees
        self.reads_prompt = any(drafter.reads_prompt for drafter in drafters)

    @property
    def config(self) -> Any:
        """The backbone's."""
        return self.backbone.config

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuse what any of the drafters refuses, and trees where only chains can be verified.

        Raises:
            ValueError: The backbone does not fit.
        """
        for drafter in self.drafters:
            drafter.check_backbone(backbone)
        if self.joins and (is_recurrent(DynamicCache(config=backbone.config)) or not takes_dense_masks(backbone)):
            raise ValueError(
                f"joins=True verifies trees of drafts, and {type(backbone).__name__} takes chains alone: leave it out"
            )

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Attaches those that are not yet; they stay attached when the cascade is detached."""
        for drafter in self.drafters:
            drafter.attach(backbone)

    def longest_draft(self) -> int | None:
        """The most of all."""
        longest = [drafter.longest_draft() for drafter in self.drafters]
        return None if None in longest else max(cast("list[int]", longest))

    def default_draft(self) -> int:
        """The most of all."""
        return max(drafter.default_draft() for drafter in self.drafters)

    def obstacle(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
        """The first of any."""
        return next(filter(None, (drafter.obstacle(config, model_kwargs) for drafter in self.drafters)), None)

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Ask for a tree where drafts are joined, so that there is room for one.

        Raises:
            ValueError: Another tree is asked for.
        """
        if self.joins and options.draft_tree is not None:
            raise ValueError(f"draft_tree={options.draft_tree!r}: with joins=True the last drafter's is a chain")
        options = super().prepare_call(options, config)
        size = 2 * (options.num_assistant_tokens or self.default_draft())
        return replace(options, draft_tree={"total_tokens": size}) if self.joins else options

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """The last drafter's; look-ups draft chains."""
        return self.last.prepare_tree(options, config)

    def start(self, options: DraftOptions) -> CascadeSession:
        """The drafts of one call.

        Raises:
            ValueError: A drafter that cannot be one of several.
        """
        sessions = []
        for drafter in self.drafters:
            number = min(options.num_tokens, drafter.default_draft())
            tree = options.draft_tree if drafter is self.last and not self.joins else None
            sessions.append(drafter.session(replace(options, num_tokens=number, draft_tree=tree)))
        for drafter, session in zip(self.drafters, sessions):
            is_sure = drafter is self.last or session.expected is not None
            if session.lookahead or session.is_deterministic or not is_sure:
                reason = "drafts in the verifying call" if is_sure else "does not say what it expects before it draws"
                raise ValueError(f"drafters: {type(drafter).__name__} {reason}, and cannot be one of several so")
        return CascadeSession(sessions, self.trusts[options.do_sample], self.least, self.joins)

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        """The last drafter's: it takes certain drafts, too."""
        return self.last.make_verifier(options, cast(CascadeSession, session).sessions[-1])


class Trust:
    """How many tokens of a look-up's drafts are accepted for each that it expects, of late.

    Args:
        start: Tokens that count as expected and accepted before anything is known.
        kept: The share of what is known that remains after a cycle, so that a look-up that fails is tried again.
    """

    def __init__(self, start: float = 16.0, kept: float = 0.98) -> None:
        self.start, self.kept = start, kept
        self.expected = self.accepted = 0.0

    @property
    def factor(self) -> float:
        """Accepted by expected tokens."""
        return (self.start + self.accepted) / (self.start + self.expected)

    def note(self, expected: float = 0.0, accepted: float = 0.0) -> None:
        """Count a cycle; one that it did not draft has neither."""
        self.expected = self.kept * self.expected + expected
        self.accepted = self.kept * self.accepted + accepted


class CascadeSession(DraftSession):
    """The drafts of one call; see `DrafterCascade`. All sessions read the text, whoever drafted it."""

    def __init__(self, sessions: list[Any], trusts: list[Trust], least: float, joins: bool = False) -> None:
        self.sessions, self.trusts, self.least, self.joins = sessions, trusts, least, joins
        self.asked: int | None = None
        self.num_tokens = max(session.num_tokens for session in sessions)
        self.reads_cache = any(session.reads_cache for session in sessions)
        self.hidden_layers = joined_layers(*(session.hidden_layers for session in sessions))

    def begin(self, outputs: Any, view: CacheView) -> None:
        """See `DraftSession`."""
        self.view = view
        for session in self.sessions:
            session.begin(outputs, view)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """One's draft, or those of two in one tree; the others are asked for none, and take in what comes before."""
        *sure, last = self.sessions
        found: DraftTree | None = None
        guess: DraftTree | None = None
        self.asked = None
        for index, session in enumerate(sure):
            tree = session.propose(tokens, 0 if found is not None else min(length, session.num_tokens))
            if found is None and length and session.expected * self.trusts[index].factor >= self.least:
                found, self.asked = tree, index
            elif self.joins and guess is None and tree.tokens.shape[1]:
                guess = tree
        tree = last.propose(tokens, 0 if found is not None else min(length, last.num_tokens))
        if found is not None:
            return found
        return tree if guess is None or not tree.tokens.shape[1] else joined_chains(guess, tree)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """See `DraftSession`."""
        accepted = [count - 1 for count in self.view.new_tokens.counts if count]
        for index, trust in enumerate(self.trusts):
            if index == self.asked:
                trust.note(self.sessions[index].expected, sum(accepted) / max(1, len(accepted)))
            else:
                trust.note()
        for session in self.sessions:
            session.advance(outputs, result)

    def finish(self, statistics: Speculation) -> None:
        """See `DraftSession`."""
        for session in self.sessions:
            session.finish(statistics)

    def coverage(self, tokens: Any) -> float | None:
        """The last drafter's: look-ups draft every token."""
        return self.sessions[-1].coverage(tokens)
