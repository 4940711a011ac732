"""Lookahead decoding: guesses of the text ahead that the backbone corrects in every call, and the n-grams they pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...configuration.fields import check_values
from ..backbone.backbones import takes_dense_masks
from ..call.options import CallOptions, DraftOptions
from ..call.sequences import Sequences
from ..contract import CacheView, DraftTree, TargetOutput, VerificationResult
from ..tensors.masks import cached_arange, made_once
from .base import TableDrafter, TableSession, merged

_MOST_COST = 2.0
"""What a block may cost, in plain tokens, where nobody has chosen its size."""


class LookaheadDrafter(TableDrafter):
    """Drafts n-grams that the backbone itself has made while it decoded, without a model or text that repeats itself.

    Every block carries a window of guesses: `window` positions ahead, and behind each of them the tokens that the last
    `ngram_size` - 1 cycles had there (Jacobi iterations). The backbone's own next tokens behind them are the next
    guesses, and with each position an n-gram is complete: a table keeps the `candidates` newest n-grams of every first
    token, and those of the last token are verified in the same block (Lookahead decoding, Fu et al. 2024). Guesses are
    deterministic given the text before them, so that sampling stays exact. The table is shared by all sequences, and
    by all calls until `forget`. Where the backbone takes no trees, the guesses alone are drafted, as a chain (Jacobi
    decoding).

    As look-ups do that remember text, drafts tell a user what others have sent: give each his own drafter where they
    must not.

    Args:
        window: Positions ahead, W.
        ngram_size: Tokens of an n-gram with its first one, N.
        candidates: N-grams that are kept for every first token, and verified, G.

    Example:
        >>> drafter = LookaheadDrafter().attach(model)
        >>> out = model.generate(**inputs, assistant_model=drafter)
        >>> drafter.forget()
    """

    def __init__(self, window: int = 15, ngram_size: int = 5, candidates: int = 15) -> None:
        self.window, self.ngram_size, self.candidates = window, ngram_size, candidates
        check_values(self, {}, {"window": "[1, inf)", "ngram_size": "[2, inf)", "candidates": "[1, inf)"})
        self.num_tokens = window + ngram_size - 2

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """See `BaseDrafter`; its tree is its own, and another `draft_tree` is refused."""
        levels, window = self.sizes(options.num_assistant_tokens or self.num_tokens)
        nodes = levels * (self.candidates + window)
        tree = {"depth": levels + window - 2, "top_k": self.candidates + 1, "total_tokens": nodes + 1}
        if options.draft_tree not in (None, tree):
            raise ValueError(f"draft_tree={options.draft_tree!r}: trees follow from window, ngram_size and candidates")
        if takes_dense_masks(self.backbone):
            options = replace(options, draft_tree=tree)
        return super().prepare_call(options, config)

    def sizes(self, longest: int) -> tuple[int, int]:
        """Return the levels of guesses and the positions of the window for paths of a length."""
        levels = min(self.ngram_size - 1, longest)
        return levels, min(self.window, longest - levels + 1)

    def first_entry(self, vocabulary: int) -> Tensor:
        """Return n-grams of one token each, [G, N - 1] int64."""
        return (torch.arange(self.candidates) % vocabulary)[:, None].repeat(1, self.ngram_size - 1)

    def start(self, options: DraftOptions) -> LookaheadSession:
        return LookaheadSession(options, self)


class LookaheadSession(TableSession):
    """The drafts of one call, with L = N - 1 levels of guesses behind every position of the window.

    The block is b, the candidates [L, G], the first guesses [W], a chain, and the L - 1 further ones behind each.
    """

    guesses: Tensor  # [B, L, W] int64; level l of position i follows level l - 1 of it, level 0 that of position i - 1

    priors = ((0.3, 0.5),)

    def __init__(self, options: DraftOptions, drafter: LookaheadDrafter) -> None:
        self.levels, self.window = drafter.sizes(options.num_tokens)
        candidates = drafter.candidates
        if (block := options.block) is not None:
            while block(1 + self.levels * (candidates + self.window)) > _MOST_COST and max(candidates, self.window) > 1:
                candidates, self.window = (candidates + 1) // 2, (self.window + 1) // 2
        super().__init__(options, drafter.table_of(options)[:, :candidates, : self.levels])  # [V + 1, G, L]
        self.num_tokens = self.levels + self.window - 1

    def positions(self, length: int) -> int:
        """See `DraftSession`; shorter drafts would leave out what later ones are made of."""
        return 1 + self.levels * (self.table.shape[1] + self.window)

    def begin(self, outputs: object, view: CacheView) -> None:
        """Begin with guesses from the prompt; without trees, there is one level of them, and no candidates."""
        self.view = view
        if not (view.takes_trees and self.options.draft_tree):
            self.levels, self.window, self.table = 1, self.num_tokens, self.table[:, :0, :1]
        prompt, count = self.options.prompt, self.levels * self.window
        spread = cached_arange(count, prompt.device) * 7 + 1  # [L W]
        if prompt.shape[1]:
            known = prompt[:, spread % prompt.shape[1]]  # [B, L W]
        else:
            known = (spread % (len(self.table) - 1)).expand(len(prompt), -1)
        self._keep(known.unflatten(1, (self.levels, self.window)))

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        if not self.table.shape[1]:
            return DraftTree.chain(self.guesses[:, 0, :length])
        grams = self.candidates(tokens)[..., :length].transpose(1, 2)  # [B, l, G]
        parents, nodes = merged(grams), grams.flatten(1)  # [B, l G] each
        if length < self.num_tokens:
            return DraftTree(nodes, parents, depth=grams.shape[1])
        behind = self.guesses[:, 1:].transpose(1, 2).flatten(1)  # [B, W (L - 1)]
        window = _window_parents(self.levels, self.window, parents.shape[1], nodes.device).expand(len(nodes), -1)
        nodes = torch.cat([nodes, self.guesses[:, 0], behind], 1)  # [B, m]
        parents = torch.cat([parents, window], 1)
        return DraftTree(nodes, parents, depth=self.num_tokens)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Note an n-gram for every position, and move the window behind what was added."""
        nodes = self.levels * (self.table.shape[1] + self.window)
        if outputs.block is None or outputs.block[0].shape[1] != 1 + nodes:  # near the end it has no window
            return
        added, unread = self.view.new_tokens.on_device, len(self.table) - 1
        ends = _window_ends(self.levels, self.window, added.device) - self.levels * self.window
        new = outputs.block[1][:, ends, :unread].argmax(-1)  # [B, W]
        grown = torch.cat([self.guesses[:, 1:], new[:, None]], 1)  # [B, L, W], behind each first guess
        if self.table.shape[1]:
            first = torch.where(added[:, None] > 0, self.guesses[:, 0], unread).flatten()  # [B W]
            grams = grown.transpose(1, 2).flatten(0, 1)  # [B W, L]
            known = self.table[first]  # [B W, G, L]
            # the newest is in front; one that is there already moves there
            newer = torch.cat([grams[:, None], known[:, :-1]], 1)
            is_same = (known == grams[:, None]).all(-1).long()  # [B W, G]
            moves = is_same.cumsum(1) == is_same  # up to the old position, or all
            self.write(first, torch.where(moves[..., None], newer, known))
        shift = cached_arange(self.window, added.device) + (added[:, None] - 1).clamp(min=0)  # [B, W]
        self._keep(grown.gather(2, (shift % self.window)[:, None].expand_as(grown)))

    def _keep(self, guesses: Tensor) -> None:
        self.guesses = self.view.held("lookahead.guesses", guesses)


@made_once
def _window_parents(levels: int, positions: int, before: int, device: torch.device) -> Tensor:
    """Return the parents of the window's nodes [L W], which follow `before` nodes of candidates."""
    columns = torch.arange(positions)[:, None]  # [W, 1]
    behind = positions + columns * (levels - 1) + torch.arange(levels - 1) - 1  # [W, L - 1], the node before each
    behind[:, :1] = columns
    parents = before + torch.cat([torch.arange(-1, positions - 1), behind.flatten()])
    parents[0] = -1
    return parents.to(device)


@made_once
def _window_ends(levels: int, positions: int, device: torch.device) -> Tensor:
    """Return the last node of every position [W] in the window."""
    ends = torch.arange(positions)
    return (ends if levels == 1 else positions + (levels - 1) * (ends + 1) - 1).to(device)
