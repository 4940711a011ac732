"""Prompt lookup: the tokens that followed the last n-gram earlier in the sequence are likely to follow again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...configuration.fields import check_values
from ..call.options import CallOptions, DraftOptions
from ..call.sequences import Sequences
from ..contract import CacheView, DraftSession, DraftTree
from ..tensors.masks import cached_arange
from .base import LookUpDrafter, merged

_PRIORS = (0.15, 0.45), (0.35, 0.55), (0.55, 0.7)
"""Which shares of first and of later drafts are accepted after n-grams of 1, 2, ... tokens, in answers of SmolLM2."""


class NgramDrafter(LookUpDrafter):
    """Drafts from each sequence's own tokens, for any backbone and batch, without a model.

    The longest n-gram that ends the sequence and occurred in it before wins, and of several matches the latest; their
    continuations are deterministic drafts, so sampling stays exact. With `branches` above 1 the best matches are
    drafted as a tree.

    Args:
        longest: Tokens of the longest n-gram to look for.
        num_tokens: The most tokens to draft, unless `num_assistant_tokens` says otherwise.
        branches: Matches to draft from.

    Example:
        >>> drafter = NgramDrafter().attach(model)
        >>> out = model.generate(**inputs, assistant_model=drafter)
    """

    def __init__(self, longest: int = 3, num_tokens: int = 10, branches: int = 1) -> None:
        self.longest, self.num_tokens, self.branches = longest, num_tokens, branches
        check_values(self, {}, dict.fromkeys(("longest", "num_tokens", "branches"), "[1, inf)"))

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """See `BaseDrafter`; several branches are a tree, also where the call requests none."""
        if options.draft_tree is None and self.branches > 1:
            options = replace(options, draft_tree={"top_k": self.branches})
        return super().prepare_call(options, config)

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Validate `draft_tree={"top_k": branches}`, which overrides `branches`."""
        tree = options.draft_tree
        if not isinstance(tree, dict) or tree.keys() != {"top_k"} or tree["top_k"] < 1:
            raise ValueError(f"draft_tree={tree!r} of n-grams must be {{'top_k': branches}}, at least 1")
        return options

    def start(self, options: DraftOptions) -> NgramSession:
        return NgramSession(options, self.longest, (options.draft_tree or {}).get("top_k", self.branches))


class NgramSession(DraftSession):
    """The drafts of one call; n-grams of each length are a kind of drafts."""

    takes_fixed = True
    is_fixed = False
    quality: Tensor | None = None  # [B, W], of the next draft, where `kinds` has looked

    def __init__(self, options: DraftOptions, longest: int, branches: int) -> None:
        self.num_tokens, self.longest, self.branches = options.num_tokens, longest, branches
        self.options = options
        self.priors = [_PRIORS[min(size, len(_PRIORS) - 1)] for size in range(longest)]

    def begin(self, outputs: object, view: CacheView) -> None:
        self.is_fixed = view.is_fixed
        self.branches = self.branches if view.takes_trees or not view.is_fixed else 1

    def kinds(self, tokens: Sequences) -> list[int]:
        self.quality = self._quality(tokens)  # [B, W]
        found = (self.quality.amax(1) // self.quality.shape[1] - 1).tolist()
        return [-1 if done else kind for kind, done in zip(found, tokens.done)]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return the continuations of the best matches, which repeat from the match on where they reach the end."""
        known, self.quality = self.quality, None
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        quality = self._quality(tokens) if known is None else known  # [B, W]
        branches = min(self.branches, quality.shape[1])
        best = quality.topk(branches, dim=1)  # [B, branches]
        matches = torch.where(best.values > 0, best.indices, best.indices[:, :1])
        period = (tokens.ends[:, None] - 1 - matches).clamp(min=1)  # [B, branches]
        source = matches[..., None] + 1 + cached_arange(length, matches.device) % period[..., None]  # [B, branches, m]
        drafts = tokens.at(source.transpose(1, 2).flatten(1))  # level by level, so that short drafts end
        counts = branches * length * (best.values[:, 0] > 0)  # [B]
        if counts.is_cpu and not self.is_fixed and not counts.any():  # elsewhere the host would wait for it
            return DraftTree.chain(tokens.ids[:, :0])
        if branches == 1:
            return DraftTree.chain(drafts, num_nodes=counts)
        return DraftTree(drafts, merged(drafts.unflatten(1, (length, branches))), depth=length, num_nodes=counts)

    def _quality(self, tokens: Sequences) -> Tensor:
        """Return how good every position is to continue from, [B, W] int64; 0: useless."""
        width = tokens.ids.shape[1] if self.is_fixed else max(tokens.lengths)
        ids, steps = tokens.ids[:, :width], tokens.steps[:width]
        newest, last = tokens.newest(self.longest), tokens.ends[:, None] - 1  # [B, n], [B, 1]
        same = torch.nn.functional.pad(ids, (self.longest - 1, 0), value=-1).unfold(1, self.longest, 1)  # [B, W, n]
        same = (same == newest[:, None]) & (steps < last)[..., None]  # a match has a next token
        length = same.flip(2).cumprod(2).sum(2)  # [B, W], of the n-gram that ends in each position
        masks = self.options.masks(tokens, is_warped=False)
        if masks is not None:  # no matches before an excluded token
            size = self.options.backbone.config.get_text_config().vocab_size
            allowed = masks.allowed((len(ids), size), ids.device)  # [B, V]
            following = torch.nn.functional.pad(ids[:, 1:], (0, 1)).clamp(max=size - 1)  # [B, W]
            length = torch.where(allowed.gather(1, following), length, 0)
        return torch.where(length > 0, length * width + steps, 0)
