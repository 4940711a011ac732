"""Prompt lookup: the tokens that followed the last n-gram earlier in the sequence are likely to follow again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...configuration.fields import check_values
from ..call.options import CallOptions, DraftOptions
from ..call.sequences import Sequences
from ..contract import CacheView, DraftSession, DraftTree, TargetOutput, VerificationResult
from ..tensors.masks import cached_arange
from .base import LookUpDrafter, merged


class NgramDrafter(LookUpDrafter):
    """Drafts from each sequence's own tokens, for any backbone and batch, without a model.

    The longest n-gram that ends the sequence and occurred in it before wins, and of several matches the latest; their
    continuations are deterministic drafts, so sampling stays exact. With `branches` above 1 the best matches are
    drafted as a tree. A sequence whose drafts were rejected gets shorter ones, and longer ones again as they are
    accepted: of k drafts, a of them accepted, the next has max(2 a + 2, k / 2) tokens at most.

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
    """The drafts of one call.

    The host knows the lengths of drafts as well as the device; where shapes are fixed, drafts are as long as any may
    be, and `num_nodes` counts.
    """

    takes_fixed = True
    has_draft: Tensor  # [B] bool, whether the newest draft has tokens
    reach_on_device: Tensor | None = None  # [B] int64, the length of every next draft; None before the first

    def __init__(self, options: DraftOptions, longest: int, branches: int) -> None:
        self.num_tokens, self.longest, self.branches = options.num_tokens, longest, branches
        self.options = options
        # a schedule that measures tries its own lengths
        self.is_adaptive = options.schedule != "adaptive"
        # the same as `reach_on_device`, 0 where a sequence has ended; empty where shapes are fixed
        self.is_fixed, self.reach = False, list[int]()

    def begin(self, outputs: object, view: CacheView) -> None:
        self.view, self.is_fixed = view, view.is_fixed

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        new = self.view.new_tokens
        if not self.is_adaptive or self.reach_on_device is None:
            return
        each = zip(self.reach, new.counts, self.tokens.drafted_on_host)
        self.reach = [
            0 if not count else min(max(2 * count, reach // 2), self.num_tokens) if drafted else reach
            for reach, count, drafted in each
        ]
        accepted = (new.on_device - 1).clamp(min=0)  # [B]
        longer = torch.maximum(2 * accepted + 2, self.reach_on_device // 2).clamp(max=self.num_tokens)  # [B]
        self.reach_on_device = self._held("reach", torch.where(self.has_draft, longer, self.reach_on_device))  # [B]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return the continuations of the best matches, which repeat from the match on where they reach the end."""
        self.tokens = tokens
        if length < 1:
            self.has_draft = tokens.ends < 0
            return DraftTree.chain(tokens.ids[:, :0])
        if self.reach_on_device is None:
            self.reach_on_device = self._held("reach", torch.full_like(tokens.ends, self.num_tokens))  # [B]
            self.reach = [] if self.is_fixed else [self.num_tokens] * len(tokens.ids)
        length = min(length, max(self.reach, default=length))
        quality = self._quality(tokens)  # [B, W]
        branches = min(self.branches, quality.shape[1])
        best = quality.topk(branches, dim=1)  # [B, branches]
        matches = torch.where(best.values > 0, best.indices, best.indices[:, :1])
        period = (tokens.ends[:, None] - 1 - matches).clamp(min=1)  # [B, branches]
        source = matches[..., None] + 1 + cached_arange(length, matches.device) % period[..., None]  # [B, branches, m]
        drafts = tokens.at(source.transpose(1, 2).flatten(1))  # level by level, so that short drafts end
        self.has_draft = self._held("has_draft", best.values[:, 0] > 0)  # [B]
        counts = torch.where(self.has_draft, branches * self.reach_on_device.clamp(max=length), 0)
        if branches == 1:
            return DraftTree.chain(drafts, num_nodes=counts)
        return DraftTree(drafts, merged(drafts.unflatten(1, (length, branches))), depth=length, num_nodes=counts)

    def _held(self, name: str, value: Tensor) -> Tensor:
        return self.view.held(f"ngram.{name}", value) if self.is_fixed else value

    def _quality(self, tokens: Sequences) -> Tensor:
        """Return how good every position is to continue from, [B, W] int64; 0: useless."""
        width = tokens.ids.shape[1] if self.is_fixed else max(tokens.lengths)
        ids, steps = tokens.ids[:, :width], tokens.steps[:width]
        newest, last = tokens.newest(self.longest), tokens.ends[:, None] - 1  # [B, n], [B, 1]
        same = steps < last  # a match has a next token
        length = torch.zeros_like(ids)  # [B, W], of the n-gram that ends in each position
        for back in range(min(self.longest, width)):
            shifted = torch.nn.functional.pad(ids, (back, 0), value=-1)[:, :width]  # [B, W]
            same = same & (shifted == newest[:, self.longest - 1 - back, None])  # [B, W]
            length = length + same
        masks = self.options.masks(tokens, is_warped=False)
        if masks is not None:  # no matches before an excluded token
            size = self.options.backbone.config.get_text_config().vocab_size
            allowed = masks.allowed((len(ids), size), ids.device)  # [B, V]
            following = torch.nn.functional.pad(ids[:, 1:], (0, 1)).clamp(max=size - 1)  # [B, W]
            length = torch.where(allowed.gather(1, following), length, 0)
        return torch.where(length > 0, length * width + steps, 0)
