"""Drafts of a block drafter: chains and trees from the joint distribution of one block.

Columns of the drafter's own cache are those of the backbone's: column t holds keys and values of the context of token
t. A block lies behind them, at the end of each sequence, and the next cycle overwrites it:

    cache      ... x y  b  m  m  m       b: the token that verification added; its state does not exist yet
    drafts                d1 d2 d3       (of a block whose first row drafts, d1 comes from b's row)
    verified   ... x y  b  d1            states of b and d1, which the backbone has read, become context
    next       ... x y  b  d1 z  m ...   z is added
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from transformers import DynamicCache

from ...generation.backbone.cache import drafter_layout, of_accepted
from ...generation.call.options import DraftOptions
from ...generation.call.sequences import Sequences
from ...generation.contract import (
    CacheView,
    DraftTree,
    HiddenLayers,
    PrefillOutput,
    TargetOutput,
    VerificationResult,
    each_state,
)
from ...generation.tensors.masks import cached_arange, model_mask, to_device
from ...generation.trees.building import of_real
from ...generation.trees.growth import grow
from ..heads.attached import HeadSession, WindowGrowth
from .network import Block, BlockNetwork, JointProjection, seen_rows, sees_all, window_of


class BlockSession(HeadSession):
    """The drafts of one call of an attached `BlockDrafter`."""

    def __init__(self, drafter: BlockNetwork, options: DraftOptions) -> None:
        is_argmax = options.do_sample and drafter.config.draft_sampling == "argmax"
        self.options = replace(options, do_sample=False) if is_argmax else options
        if is_argmax:  # constraints have states
            vars(self.options)["processing"] = options.processing
        self.drafter, self.num_tokens, self.vocabulary = drafter, options.num_tokens, drafter.draft_vocabulary
        self.hidden_layers: HiddenLayers = drafter.feature_layers
        self.column = 0 if self.vocabulary is None else int(self.vocabulary.ids[0])
        self.cache = DynamicCache(config=drafter.config)  # layers with a window keep no more than that

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Take the context of the prompt; columns of an earlier call in the backbone's cache are ignored."""
        self.view, drafter = view, self.drafter
        context, limit = drafter.fuse(outputs.hidden_states), self.options.max_length  # [B, L, d]
        span = self.num_tokens + 1 + drafter.config.block_size
        self.layout = drafter_layout(view, context.shape[1], limit, span, "block")
        self.layout.install_layers(self.cache)
        weight, bias, gains = drafter.joint_projection()
        weight, gains = view.held("block.joint", weight.detach()), view.held("block.gains", gains.detach())
        bias = None if bias is None else view.held("block.bias", bias.detach())
        self.joint = JointProjection(weight, bias, gains)
        self.layout.block_offset = -context.shape[1]
        self._extend(context)
        self.layout.block_offset = 0

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Take the context of b and of the accepted drafts."""
        new = self.view.new_tokens
        if self.view.is_fixed:
            states = each_state(outputs.hidden_states, lambda state: of_accepted(state, new.on_device)) or ()
        elif new.longest == 0:
            return
        else:
            states = outputs.first(new.longest)
        self._extend(self.drafter.fuse(states))
        self.layout.keep(new)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return a chain or a tree after every sequence, with paths of at most `length` tokens."""
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        block, masks = self._block(tokens.last(), length), self.options.masks(tokens)
        if self.options.draft_tree is not None:
            growth = WindowGrowth(block.of_tree(), block.last[:, None])
            return self._sure(block, grow(growth, self.options, length, masks))
        return self._sure(block, DraftTree.chain(*self._chain(block.distribution, length, masks)))

    def _sure(self, block: Block, tree: DraftTree) -> DraftTree:
        """Return a tree without tokens that will hardly be accepted, and without what is below them.

        The estimate of a token does not depend on the token, so that what is left is distributed as before: a node has
        all children that were drawn, or none.
        """
        least = self.drafter.config.confidence_threshold
        likely = self.drafter.confidence(block, tree) if least else None
        if least is None or likely is None:
            return tree
        is_sure = to_device(likely.sigmoid() >= least, tree.tokens.device)
        real = (is_sure[:, None] | ~tree.mask()[:, 1:, 1:]).all(-1)  # [B, m]
        return of_real(tree, real, not self.view.is_fixed)

    def _extend(self, context: Tensor) -> None:
        """Write a context [B, C, d] to the cache, from the layout's block on."""
        layout = self.layout
        positions = layout.positions(context.shape[1])  # [B, C]
        layout.begin(context.shape[1])
        self.drafter.extend(context, to_device(positions, context.device), self.cache, self.joint)

    def _block(self, last: Tensor, length: int) -> Block:
        """Fill in a block behind the context."""
        drafter, layout, config = self.drafter, self.layout, self.drafter.config
        size, device = config.block_size, drafter.device
        embedded = drafter.embed_rows(last)  # [B, S, d]
        kinds = dict.fromkeys(config.layer_types or ())
        layout.is_maskless = sees_all(config) and not layout.needs_mask(1)
        masks: dict[str, Tensor | None] = dict.fromkeys(kinds)
        for kind in () if layout.is_maskless else kinds:
            rows = seen_rows(config, kind, layout.ends.device)[None]  # [1, S, S]
            depths = cached_arange(size, layout.ends.device)[None]
            seen = layout.visible(size, window_of(config, kind), new=rows, depths=depths)  # [B, S, W]
            masks[kind] = model_mask(to_device(seen, device), config, embedded.dtype)
        layout.begin(size)
        positions = layout.counts[:, None] + cached_arange(size, layout.ends.device)  # [B, S]
        hidden = drafter.rows(embedded, to_device(positions, device), masks, self.cache)
        return Block(drafter, hidden, to_device(last, device), length)
