"""Drafts of sequential modules (DeepSeek-V3): chains and trees of depth D, whose last module is reused for longer
drafts.

Columns are those of the backbone's cache: column i of module k holds h^{k-1}_i together with the embedding of the token
k positions later. The last D - 1 columns of deeper modules were computed from drafts, and are computed again once it is
known which of them were accepted: the settled columns of the modules' own cache end D - 1 columns before the
backbone's, and the session holds the hidden states of the columns after them. As many columns are pending in all
sequences: those with fewer new tokens read some columns again.

In a tree, every node has its own path of columns in every module. With t the backbone's last column, and nodes d1,
d2 on a path:

    column       ..  t-2          t-1          t            t+1
    module 1         x[t-1]       x[t]         b
    module 2         x[t]         b            d1                      settled: up to t-1
    module 3 = D     b            d1           d2                      settled: up to t-2
    module 3 again   b            d1           d2           d3         columns after D move on

A node is a column that sees the settled ones, its ancestors and itself; its input is the output of its parent in the
module before. A level of nodes that meets a module for the first time brings all its ancestors along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...configuration.fields import chooses_blocks, masks_padding_alone
from ...generation.backbone.cache import drafter_layout, of_accepted
from ...generation.backbone.special import layer_class, own_columns
from ...generation.backbone.target import note_positions
from ...generation.backbone.wrapped_models import Kwargs
from ...generation.call.constraints import DraftMasks
from ...generation.call.options import DraftOptions, chain_of
from ...generation.call.sequences import NewTokens, Sequences
from ...generation.contract import (
    CacheView,
    DraftSession,
    DraftTree,
    PrefillOutput,
    TargetOutput,
    VerificationResult,
    taken,
)
from ...generation.tensors.masks import cached_arange, cached_range
from ...generation.trees.growth import Ancestry, grow, most_nodes
from ..common.backbone_parts import part_logits

_LAG = 64  # columns that may wait for the modules that a short draft did not need


class ModuleSession(DraftSession):
    """Drafts by chaining modules on the backbone's last hidden state; not every attention takes a tree."""

    hidden_layers, supports_confidence_threshold = -1, True

    def __init__(self, model: Any, options: DraftOptions) -> None:
        self.model, self.options, self.depth = model, options, model.num_modules
        self.num_tokens = options.num_tokens
        self.vocabulary = options.extra.get("draft_vocabulary", model.draft_vocabulary)
        self.vocab_size = model.config.get_text_config().vocab_size
        self.cache = model.mtp.new_cache()
        others = set(model.mtp.kinds) - {"full_attention", "sliding_attention"}  # whose masks differ by sequence
        if options.draft_tree is not None and others:
            raise ValueError(f"draft_tree: modules with {', '.join(sorted(others))} draft chains only; leave it out")
        self.takes_fixed = not others and layer_class(model.config) is None

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Take the prompt's states [B, L, D]; columns of an earlier call in the backbone's cache are ignored."""
        self.view, self.states = view, outputs.hidden_states[-1]
        embeds = outputs.get("inputs_embeds")
        self.prompt = None if embeds is None else PromptParts(embeds, outputs.get("position_ids"), view.counts)
        self.pending = self.states.shape[1]
        # pending columns are read again, and sequences with fewer new tokens go back by as many meanwhile
        span = 2 * (_LAG + self.num_tokens + self.depth) + most_nodes(self.options)
        self.layout = drafter_layout(view, self.pending, self.options.max_length, span, "modules")
        self.layout.install_layers(self.cache, layer_class(self.model.config))
        if view.is_fixed:  # the columns that deeper modules compute again, and those of a draft that is accepted
            self.num_fixed = self.depth + self.num_tokens
            newest = self.states[:, -self.num_fixed :]  # and zeros before those that there are
            newest = torch.nn.functional.pad(newest, (0, 0, self.num_fixed - newest.shape[1], 0))
            self._chain(Sequences(self.options.prompt).newest(self.pending).roll(-1, 1), 0, None)
            self.states, self.pending = view.held("modules.states", newest), self.num_fixed  # [B, P, D]

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Append the newest states of every sequence, right-aligned."""
        new = self.view.new_tokens
        if self.view.is_fixed:
            self._append_fixed(outputs.state(), new)
            return
        if new.longest == 0:
            return
        wanted = self.pending + new.longest
        self.states = torch.cat([self.states, outputs.state()[:, : new.longest]], dim=1)  # [B, W, D]
        if not new.is_even:
            width = self.states.shape[1]
            source = cached_range(0, width, self.states.device) - (new.longest - new.on_device)[:, None]  # [B, W]
            self.states = taken(self.states, source.to(self.states.device).clamp(min=0))
        # sequences with fewer new tokens while columns are pending read older ones again
        self.states = self.states[:, -(wanted + _LAG + self.num_tokens + 1) :]
        self.layout.keep(new)
        self.pending = wanted

    def _append_fixed(self, block: Tensor, new: NewTokens) -> None:
        """Append the first `new` states of a block [B, F, D]: as many columns are pending in every cycle."""
        states = torch.cat([self.states, of_accepted(block, new.on_device)], dim=1)  # [B, P + F, D]
        source = new.on_device[:, None] + cached_arange(self.num_fixed, new.on_device.device)  # [B, P]
        self.states = self.view.held("modules.states", taken(states, source.to(states.device)))
        self.layout.keep(new)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        is_fixed = self.view.is_fixed
        if length < 1 and not is_fixed:
            return DraftTree.chain(tokens.ids[:, :0])
        pending, masks = self.pending, self.options.masks(tokens)
        if self.options.draft_tree is not None and length > 0 and pending >= self.depth:  # else the prompt is too short
            tree = grow(ModuleGrowth(self, tokens), self.options, length, masks)
            self.pending = self.depth - 1
        else:
            tree = self._chain(tokens.newest(pending), length, masks)
        if is_fixed:
            self.pending = self.num_fixed
        return tree

    def _chain(self, ids: Tensor, length: int, masks: DraftMasks | None) -> DraftTree:
        """Return a chain of up to `length` tokens after the pending ones [B, R].

        It ends with a token that no sequence is sure of.
        """
        pending = self.pending
        hidden, first = self.states[:, -pending:], -pending
        late, prepared = pending > _LAG or self.view.is_fixed, self._prepared(hidden)
        drafts, probs, last = [], [], max(length, self.depth if late else 1)
        for k in range(1, last + 1):
            if k > self.depth:  # the last module goes on, one new column at a time
                hidden, ids, first, prepared = hidden[:, -1:], ids[:, -1:], k - self.depth - 1, None
            hidden = self._step(k, hidden, ids, first, prepared)
            if k <= length:
                logits = self._logits(k, hidden[:, -1])  # [B, v]
                token, distribution = self.options.choose(logits, self.draft_ids(logits.device), self.vocab_size, masks)
                drafts.append(token)
                probs.append(distribution)
            else:  # any token: the columns that it is read in are computed again
                token, distribution = ids[:, -1], None
            ids = torch.cat([ids[:, 1:], token[:, None]], dim=1)  # [B, R]
            if not late and self.options.is_unsure(token, distribution):
                last = k
                break
        if last >= self.depth:  # only columns whose tokens are verified count, in all modules alike
            self.pending = min(self.pending, self.depth - 1)
        return chain_of(drafts, probs, self.options) if drafts else DraftTree.chain(ids[:, :0])

    def _step(self, k: int, hidden: Tensor, ids: Tensor, first: int, prepared: Kwargs | None = None) -> Tensor:
        """Run module k over columns that begin `first` after the backbone's, [B, R, H]."""
        self.layout.block_offset = first
        embeddings = self.model.module_embeddings()(ids)  # [B, R, H]
        if self.prompt is not None:
            own = cached_range(first, ids.shape[1], self.layout.ends.device)
            embeddings = self.prompt.embeddings(embeddings, self.layout.counts[:, None] + own + k)
        inputs = {"position_ids": prepared["position_ids"]} if prepared else self._inputs(k, ids.shape[1])
        note_positions(self.cache, inputs["position_ids"])
        with own_columns(self.model.mtp, self.cache):
            return self.model.mtp.step(k, hidden, embeddings, **inputs, prepared=prepared)

    def _inputs(self, k: int, size: int, seen: Tensor | None = None, depths: Tensor | None = None) -> Kwargs:
        """Return the inputs of module k for columns, which begin `layout.block_offset` after the backbone's."""
        layout, kind = self.layout, self.model.mtp.kinds[min(k, self.depth) - 1]
        config = self.model.config.get_text_config()
        window = config.sliding_window if "sliding" in kind else None
        chunk = config.attention_chunk_size if kind == "chunked_attention" else None
        layout.is_maskless = seen is None and not layout.needs_mask(size)
        mask = None if layout.is_maskless else layout.visible(size, window, chunk, new=seen, depths=depths)[:, None]
        mask = layout.real_tokens(size) if masks_padding_alone(config) else mask
        own = cached_range(layout.block_offset, size, layout.ends.device) if depths is None else depths[:, -size:]
        # blocks of columns are chosen by positions, which then begin with the columns of the modules' own cache
        counts = layout.ends if chooses_blocks(config) else layout.counts
        positions = (counts[:, None] + own).clamp(min=0)  # [B, R]
        return {
            "position_ids": positions if self.prompt is None else self.prompt.positions(positions),
            "attention_mask": mask,
            "past_key_values": self.cache,
        }

    def _prepared(self, hidden: Tensor) -> Kwargs | None:
        """Return the mask and rotary embedding that all of several modules share; None: they attend differently."""
        if self.depth == 1 or len(set(self.model.mtp.kinds)) > 1:
            return None
        self.layout.block_offset = -hidden.shape[1]
        return self.model.mtp.options(0, hidden, **self._inputs(1, hidden.shape[1]))

    def _nodes(self, k: int, states: Tensor, ids: Tensor, distances: Tensor, seen: Tensor) -> Tensor:
        """Run module k over nodes of a tree, [B, R, H], which see settled columns and the nodes `seen` [B, R, n].

        `distances` [n] are the columns by which nodes follow the backbone's last one, the last R being these.
        """
        count = ids.shape[1]
        self.layout.block_offset = 1 - k + len(distances) - count
        inputs = self._inputs(k, count, seen, distances[None] - 1)
        return self.model.mtp.step(k, states, self.model.module_embeddings()(ids), **inputs)

    def _logits(self, k: int, hidden: Tensor) -> Tensor:
        """Return logits [.., v] of the tokens that may be drafted, from states at depth k."""
        readout = self.model.readout_of(k)
        if self.vocabulary is None:
            return readout(hidden)
        return readout.finish(part_logits(self.vocabulary, readout.head, readout.normed(hidden)))

    def draft_ids(self, device: torch.device) -> Tensor | None:
        """Return the token ids of the columns of logits; None: every token, in order."""
        return None if self.vocabulary is None else self.vocabulary.on(device)

    def coverage(self, tokens: Tensor) -> float | None:
        """Return the share of tokens [N] that could be drafted; None where all can."""
        return None if self.vocabulary is None else self.vocabulary.coverage(tokens)


class PromptParts:
    """Embeddings and positions of a prompt with images, which do not follow from its ids alone.

    `embeds` [B, L, H] are those of its last columns, right-aligned; `position_ids` [1, 3 or 4, B, L], the last three of
    rotary embeddings, or one alike; or [B, L] or None, where images change none; `counts` [B] its real tokens.
    """

    def __init__(self, embeds: Tensor, position_ids: Tensor | None, counts: Tensor) -> None:
        self.embeds, self.first = embeds, (counts - embeds.shape[1]).clone()  # the text's position of column 0
        self.shifts = None
        if position_ids is not None and position_ids.dim() == 3:
            rotated = position_ids[-3:].to(counts.device).expand(3, -1, -1)  # [3, B, L]
            own = self.first[:, None] + cached_range(0, embeds.shape[1], counts.device)  # [B, L]
            after = rotated.masked_fill(own < 0, 0).amax((0, 2))[:, None] + 1 - counts[:, None]  # [B, 1]
            self.shifts = torch.cat([rotated - own, after.expand(3, -1, -1)], dim=2)  # [3, B, L + 1]

    def embeddings(self, embeds: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings [B, R, H] of tokens at positions [B, R]: the prompt's own where it has them."""
        columns = (positions - self.first[:, None]).to(embeds.device)  # [B, R]
        size = self.embeds.shape[1]
        known = taken(self.embeds.to(embeds.device), columns.clamp(0, size - 1))  # [B, R, H]
        return torch.where(((columns >= 0) & (columns < size))[..., None], known, embeds)

    def positions(self, positions: Tensor) -> Tensor:
        """Return the positions of rotary embeddings [3, B, R] at positions [B, R]; these where images change none."""
        if self.shifts is None:
            return positions
        columns = (positions - self.first[:, None]).clamp(0, self.shifts.shape[2] - 1)  # [B, R]
        return positions + self.shifts.gather(2, columns.expand(3, -1, -1))  # [3, B, R]


class ModuleGrowth:
    """Grows a tree after the columns of one cycle; at least D of them are not settled."""

    def __init__(self, drafter: ModuleSession, tokens: Sequences) -> None:
        self.drafter, self.ancestry = drafter, Ancestry()
        self.draft_ids, self.vocab_size = drafter.draft_ids(tokens.ids.device), drafter.vocab_size
        self.tokens, self.tops = tokens, list[Tensor]()  # of every module its newest settled column
        self.nodes, self.above = list[Tensor](), list[Tensor]()  # by level: token ids, indices of parents,
        self.seen = list[Tensor]()  # ancestors among all nodes so far,
        self.states = list[Tensor]()  # and what they became in the module before

    def first(self) -> Tensor:
        """See `Growth`; settles the newest columns of all modules."""
        drafter, pending = self.drafter, self.drafter.pending
        hidden, ids = drafter.states[:, -pending:], self.tokens.newest(pending)
        for k in range(1, drafter.depth + 1):
            if k > 1:
                hidden, ids = hidden[:, :-1], ids[:, 1:]
            hidden = drafter._step(k, hidden, ids, -pending)
            self.tops.append(hidden[:, -1:])  # [B, 1, H]
        return drafter._logits(1, self.tops[0])[:, 0]  # [B, v]

    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.nodes.append(tokens)
        self.above.append(parents)
        self.seen.append(self.ancestry.extend(parents))
        depth, module = self.drafter.depth, min(len(self.nodes) + 1, self.drafter.depth)
        first = 0 if len(self.nodes) < depth else len(self.nodes) - 1  # the first level that the module has not met
        levels = range(first, len(self.nodes))
        inputs = [self._input(level, module) for level in levels]
        ids = torch.cat(self.nodes[first:], dim=1)  # [B, R]
        width = sum(level.shape[1] for level in self.nodes)
        seen = [torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in self.seen[first:]]  # [B, k, n]
        # by how many columns every node follows the backbone's last one, [nodes] int64
        distances = [torch.zeros_like(part[0]) + (level + 2 - module) for level, part in enumerate(self.nodes)]
        states = self.drafter._nodes(module, torch.cat(inputs, 1), ids, torch.cat(distances), torch.cat(seen, 1))
        parts = states.split([self.nodes[level].shape[1] for level in levels], dim=1)
        self.states[first:] = parts
        return self.drafter._logits(module, parts[-1])  # [B, k, v]

    def _input(self, level: int, module: int) -> Tensor:
        """Return the inputs of the nodes of a level: their parents' states, or those of the newest settled column."""
        if level == 0:
            return self.tops[max(module - 2, 0)].expand(-1, self.nodes[0].shape[1], -1)
        return taken(self.states[level - 1], self.above[level])  # [B, k, H]
