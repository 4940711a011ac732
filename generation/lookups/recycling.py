"""Token recycling: what the backbone thought of as the next token, the last time that it saw a token, may come now."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...configuration.fields import check_values
from ..backbone.backbones import takes_dense_masks
from ..backbone.wrapped_models import Kwargs
from ..call.options import CallOptions, DraftOptions
from ..call.sequences import Sequences
from ..contract import CacheView, DraftTree, TargetOutput, VerificationResult
from ..trees.building import choices_from_accuracies, ranked_tree
from .base import TableDrafter, TableSession

_FIRST, _FALL = 0.6, 1.3
"""How often the first candidate of a token is right, and the power of its rank that the others' share falls with."""


class RecyclingDrafter(TableDrafter):
    """Drafts the candidates that the backbone itself had for the tokens of a path, without a model or a search in text.

    A table holds the `top_k` most likely next tokens for every token, by the logits of the last position that was
    verified at it: those of rejected drafts, too, which cost nothing more. A draft is a tree of fixed shape, found in
    the table level by level (Token Recycling, Luo et al. 2024). Drafts are deterministic tokens, so that sampling
    stays exact. The table is shared by all sequences, and by all calls until `forget`; one for 128,000 tokens has 8 MB.
    Where the backbone takes no trees, the most likely path alone is drafted.

    As look-ups do that remember text, drafts tell a user what others have sent: give each his own drafter where they
    must not.

    Args:
        top_k: Candidates of every token.
        num_tokens: The longest path, unless `num_assistant_tokens` says otherwise.
        total_tokens: Size of the block, the last verified token included; `draft_tree=` sets another tree for a call.

    Example:
        >>> drafter = RecyclingDrafter().attach(model)
        >>> out = model.generate(**inputs, assistant_model=drafter)
        >>> drafter.forget()
    """

    def __init__(self, top_k: int = 8, num_tokens: int = 6, total_tokens: int = 81) -> None:
        self.top_k, self.num_tokens, self.total_tokens = top_k, num_tokens, total_tokens
        check_values(self, {}, {"top_k": "[1, inf)", "num_tokens": "[1, inf)", "total_tokens": "[2, inf)"})

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """See `BaseDrafter`; a tree is drafted where the call requests none and the backbone takes one."""
        if options.draft_tree is None and takes_dense_masks(self.backbone):
            longest = options.num_assistant_tokens or self.num_tokens
            tree = {"depth": longest - 1, "top_k": self.top_k, "total_tokens": self.total_tokens}
            options = replace(options, draft_tree=tree)
        return super().prepare_call(options, config)

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Complete `draft_tree`: rank paths, or sizes, of which a session makes the fixed shape that promises most."""
        prepared = super().prepare_tree(options, config)
        tree = prepared.draft_tree if isinstance(prepared.draft_tree, dict) else {}
        if max((rank for path in tree.get("choices", ()) for rank in path), default=0) >= self.top_k:
            raise ValueError(f"draft_tree={tree['choices']!r}: ranks must be below top_k={self.top_k}")
        return prepared

    def first_entry(self, vocabulary: int) -> Tensor:
        return torch.arange(min(self.top_k, vocabulary))

    def start(self, options: DraftOptions) -> RecyclingSession:
        return RecyclingSession(options, self)


@cache
def _shape(depth: int, top_k: int, nodes: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return the best tree, if candidates were right by their rank alone, and how often each node is accepted then.

    Its paths of ranks are at most `depth` long, the likeliest first.
    """
    accuracies = _FIRST / torch.arange(1.0, top_k + 1) ** _FALL
    choices = choices_from_accuracies(accuracies.expand(depth, -1), nodes)
    return choices, [math.prod(accuracies[list(path)].tolist()) for path in choices]


class RecyclingSession(TableSession):
    """The drafts of one call."""

    priors = ((0.4, 0.5),)

    def __init__(self, options: DraftOptions, drafter: RecyclingDrafter) -> None:
        super().__init__(options, drafter.table_of(options))
        self.drafter = drafter
        self._choose(options.draft_tree)

    def _choose(self, tree: Kwargs | None) -> None:
        """Choose the shape of the drafts: a chain where no tree is requested, and what pays where nothing is."""
        tree = tree or {"top_k": 1, "total_tokens": self.num_tokens + 1}
        size = min(tree.get("top_k", 1), self.table.shape[1]), tree.get("total_tokens", 2) - 1
        best, shares = _shape(self.num_tokens, *size)
        if (block := self.options.block) is not None:
            best = best[: max(block.best(shares), 1)]
        self.choices: list[tuple[int, ...]] = tree.get("choices") or best

    def begin(self, outputs: object, view: CacheView) -> None:
        self.view = view
        if not view.takes_trees:
            self._choose(None)

    def positions(self, length: int) -> int:
        return 1 + sum(len(path) <= length for path in self.choices)

    def kinds(self, tokens: Sequences) -> list[int]:
        entries = self.table[tokens.last()]  # [B, k]
        is_known = (entries != self.drafter.first_entry(len(self.table) - 1).to(entries.device)).any(1)  # [B]
        return [0 if known and not done else -1 for known, done in zip(is_known.tolist(), tokens.done)]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        choices = [path for path in self.choices if len(path) <= length]
        tree = ranked_tree(
            choices,
            self.candidates(tokens),
            lambda nodes, parents: self.table[nodes],
            lambda rows, width: rows[..., :width],
        )
        return DraftTree.chain(tree.tokens) if len(choices) == tree.depth else tree

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Note the candidates at all positions of the block but those of sequences that had ended."""
        if outputs.block is None:
            return
        block, logits = outputs.block
        unread = len(self.table) - 1
        rows = torch.where(self.view.new_tokens.on_device[:, None] > 0, block, unread).flatten()  # [N]
        candidates = logits[..., :unread].topk(self.table.shape[1]).indices.flatten(0, 1)  # [N, k]
        self.write(rows, candidates)
