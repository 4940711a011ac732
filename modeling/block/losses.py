"""The blocks that are trained, and their loss: terms of every place given the text before it, for all recipes.

Logits exist for some blocks at a time (`chunked_sums`), so that memory does not grow with blocks times vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ...configuration.block import READS_TEACHER, BlockDrafterConfig, BlockLossOptions, BlockRecipe
from ..common.backbone_parts import BackboneParts
from ..common.chunks import LossSegment, chunked_sums
from ..common.learning import numbered
from ..common.outputs import BlockOutput
from ..common.teacher import ACCEPTANCES, acceptance, accepted_along, divergence, logit_summaries, sequence_log_probs
from ..heads.window_distribution import at_tokens, exact
from .laws import SelectorLaw
from .network import Block, BlockNetwork, block_masks

_LEAST_ROWS = 256  # that run together: they see columns of the context, and each other's for nothing


@dataclass
class BlockBatch:
    """A batch, and the blocks in it."""

    ids: Tensor  # [B, L] int64
    scored: Tensor  # [B, L] bool, tokens that are targets
    documents: Tensor  # [B, L] int64, each token's; -1 for padding
    positions: Tensor  # [B, L] int64, within documents
    anchors: Tensor  # [B, A] int64, columns of the tokens before blocks
    keep: Tensor  # [B, A] bool, blocks that count

    @classmethod
    def of(cls, ids: Tensor, scored: Tensor, mask: Tensor | None, positions: Tensor | None) -> BlockBatch:
        """Return a batch from the arguments of a model's forward, with blocks behind every token."""
        positions, documents = numbered(ids, mask, positions)
        anchors, real = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape), documents >= 0
        return cls(ids, scored & real, documents, positions, anchors, real)

    def side_by_side(self) -> BlockBatch:
        """Return the same with all sequences in one row, each a document."""
        numbers = torch.arange(len(self.ids), device=self.ids.device)[:, None] * self.ids.shape[1]
        documents = torch.where(self.documents < 0, -1, self.documents + numbers)
        parts = (self.ids, self.scored, documents, self.positions, self.anchors + numbers, self.keep)
        return BlockBatch(*(part.reshape(1, -1) for part in parts))

    @property
    def ends(self) -> Tensor:
        """The columns behind the last token of every sequence, [B, 1]: padding on the right is no part of it."""
        columns = torch.arange(1, self.ids.shape[1] + 1, device=self.ids.device)
        return (columns * (self.documents >= 0)).amax(1, keepdim=True)

    def at(self, anchors: Tensor, keep: Tensor | None = None) -> BlockBatch:
        """Return the same with blocks at other anchors [B, A]; `keep` [B, A] are those that count."""
        anchors = anchors.to(self.ids.device)
        keep = torch.ones_like(anchors, dtype=torch.bool) if keep is None else keep.to(self.ids.device).bool()
        return replace(self, anchors=anchors, keep=keep.view_as(anchors))

    def may_begin(self, recipe: BlockRecipe, block_size: int) -> Tensor:
        """Return the tokens behind which a recipe lets blocks begin, [B, L] bool; none is a document's first."""
        same = self.documents[:, 1:] == self.documents[:, :-1]
        may = self.scored & nn.functional.pad(same, (1, 0))
        if recipe.anchors == "inside":
            columns = torch.arange(self.ids.shape[1], device=self.ids.device)
            return may & (columns < self.ends - block_size)
        return may & nn.functional.pad(self.scored[:, 1:] & same, (0, 1))

    def drawn(self, recipe: BlockRecipe, block_size: int, count: int, is_fixed: bool) -> BlockBatch:
        """Return the same with up to `count` random blocks per sequence; `is_fixed` are the same in every call."""
        may = self.may_begin(recipe, block_size)
        generator = torch.Generator().manual_seed(0) if is_fixed else None
        chance = torch.rand(may.shape, generator=generator, device="cpu" if is_fixed else may.device)
        best = chance.to(may.device).masked_fill(~may, -1).topk(min(count, may.shape[1]), -1)
        begins, is_long = best.values >= 0, may.shape[1] >= 4 * count
        # with long sequences the host waits for no accelerator: blocks that count nowhere fill up those with fewer
        most = count if is_long and may.device.type != "cpu" else max(int(begins.sum(-1).max()), 1)
        order = best.indices[:, :most].sort(-1)
        return self.at(order.values, begins[:, :most].gather(-1, order.indices))

    def places(self, count: int) -> Tensor:
        """Return the columns of the tokens that blocks predict, [B, A, m]; those beyond the end are clamped to it."""
        ahead = self.anchors[..., None] + torch.arange(1, count + 1, device=self.ids.device)
        return ahead.clamp(max=self.ids.shape[1] - 1)

    def counted(self, recipe: BlockRecipe, config: BlockDrafterConfig) -> Tensor:
        """Return which places count, [B, A, m] bool."""
        columns = self.places(config.num_drafts)
        ahead = self.anchors[..., None] + torch.arange(1, config.num_drafts + 1, device=self.ids.device)
        inside = ahead < self.ends[..., None]
        read = (columns - int(config.sample_from_anchor and recipe.places == "rows")).clamp(min=0)
        found = inside & taken(self.scored, read)
        if recipe.within:
            found &= taken(self.documents, columns) == taken(self.documents, self.anchors)[..., None]
        found = found.long().cumprod(-1).bool() if recipe.places == "whole" else found
        return found & self.keep[..., None]


def taken(values: Tensor, columns: Tensor) -> Tensor:
    """Return values [B, L] at columns [B, ..]."""
    return values.gather(1, columns.flatten(1)).view_as(columns)


def block_rows(
    network: BlockNetwork, context: Tensor, batch: BlockBatch, from_anchor: bool = False, recomputes: bool = False
) -> Tensor:
    """Return the rows of all blocks of a batch, [B, A, S, d], from the context [B, L, d].

    Windows are measured from each row, or `from_anchor`; with `recomputes`, backward computes the rows again.
    """
    source, size = DynamicCache(), network.config.block_size
    network.extend(context, batch.positions, source, network.joint_projection())
    layers = cast(list[CacheLayerMixin], source.layers)
    columns = [cast(Tensor, part) for layer in layers for part in (layer.keys, layer.values)]
    together = max(context.shape[1] // 2, _LEAST_ROWS) // size
    found = list[Tensor]()
    for anchors, keep in zip(batch.anchors.split(together, 1), batch.keep.split(together, 1)):
        part = batch.at(anchors, keep)
        embedded = network.embed_rows(taken(part.ids, anchors)).flatten(1, 2)  # [B, a S, d]
        ahead = torch.arange(size, device=anchors.device)
        positions = (taken(part.positions, anchors)[..., None] + ahead).flatten(1)  # [B, a S]
        before = torch.arange(context.shape[1], device=anchors.device) < anchors[..., None]
        before &= part.documents[:, None] == taken(part.documents, anchors)[..., None]  # [B, a, L]
        starts = taken(part.positions, anchors).repeat_interleave(size, 1) - 1 if from_anchor else positions
        distance = starts[..., None] - part.positions[:, None]  # [B, a S, L]
        masks = block_masks(network.config, before, distance, embedded.dtype)
        run = partial(_run, network, positions, masks)
        rows = checkpoint(run, embedded, *columns, use_reentrant=False) if recomputes else run(embedded, *columns)
        found.append(cast(Tensor, rows).unflatten(1, (-1, size)))
    return torch.cat(found, 1)


def _run(
    network: BlockNetwork, positions: Tensor, masks: dict[str, Tensor | None], embedded: Tensor, *columns: Tensor
) -> Tensor:
    """Run rows behind the keys and values of a context, layer by layer."""
    cache = DynamicCache(zip(columns[::2], columns[1::2]))
    return network.rows(embedded, positions, masks, cache)


_DPACE = 0.5  # share of certainty in the acceptance that D-PACE assumes


def method_of(law: str) -> str:
    """Return the method whose recipe a law has where none is named."""
    return {"independent": "dflash", "selector": "dflash2", "domino": "domino"}.get(law, "dspark")


def place_weights(options: BlockLossOptions, recipe: BlockRecipe, counts: Tensor, batch: Tensor | int) -> Tensor:
    """Return the factors of the summed terms of all places, [m], from places that count [m] and sequences."""
    rates = options.rate() ** torch.arange(len(counts), device=counts.device, dtype=counts.dtype)
    if options.weights == "dpace":
        total = counts.new_ones(()) * batch if recipe.dpace == "batch" else counts.sum()
        return torch.ones_like(rates) / total.clamp(min=1)
    total = (counts * rates).sum() if recipe.normaliser == "weights" else counts.sum()
    return rates / total.clamp(min=1e-6)


def block_loss(
    network: BlockNetwork,
    hidden: Tensor,
    batch: BlockBatch,
    states: Tensor,
    options: BlockLossOptions,
    items: Tensor | None = None,
    summaries: Tensor | None = None,
) -> BlockOutput:
    """Return the loss of blocks, and their terms, from `block_rows` [B, A, S, d] and the backbone's last states.

    `items` [m] are the places that count over all micro-batches; `summaries` are made where they are None and read.
    """
    config, method = network.config, method_of(network.config.law)
    recipe, names = options.recipe(method), options.weighted_terms(method)
    law, size = network.joint_law, config.num_drafts
    for name, has_head in (("confidence", config.has_confidence), ("selector", isinstance(law, SelectorLaw))):
        weight = names.pop(name, 1.0)
        names |= {name: weight} if has_head else {}
    counted = batch.counted(recipe, config)  # [B, A, m]
    counts = counted.sum((0, 1))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = (counts if items is None else items).to(counts.device, wide)
    sequences = len(batch.ids) * total[0] / counts[0].clamp(min=1)
    weights = place_weights(options, recipe, total, sequences)
    columns = batch.places(size)
    tokens = taken(batch.ids, torch.cat([batch.anchors[..., None], columns], -1))  # [B, A, m + 1], b first
    terms = BlockTerms(network, options, list(names), states, batch, columns, counted, summaries)
    shares = [weight * weights for weight in names.values()]
    shares = torch.cat([*shares, *[torch.zeros_like(weights)] * terms.reads_all])
    starts = torch.arange(len(columns), device=columns.device)[:, None, None] * batch.ids.shape[1]
    arguments = (tokens, counted, columns + starts)  # columns of all sequences, one after the other
    part = LossSegment(hidden.flatten(-2), arguments, shares, scored=counted.any(-1))
    heads = nn.ModuleList([law, *([network.confidence_head] if config.has_confidence else [])])
    numbers = size * network.draft_size * (getattr(law, "rank", 1) + 1 + terms.reads_all)
    loss, (sums,) = chunked_sums(terms, heads, [part], numbers, size)
    found = dict(zip([*names, "acceptances"], sums.unflatten(0, (-1, size))))  # [m] each
    accepted = found.pop("acceptances", None)
    divisor = counts.clamp(min=1)
    means = torch.stack([names[name] * value for name, value in found.items()]).sum(0) / divisor
    return BlockOutput(
        loss=loss,
        terms={name: (value * weights).sum() for name, value in found.items()},
        head_losses=torch.where(counts > 0, means, torch.nan),
        acceptances=None if accepted is None else accepted / divisor,
    )


class BlockTerms:
    """Makes the terms of some blocks from their rows: [N, n m], n terms and, if p is read, the acceptance."""

    def __init__(
        self,
        network: BlockNetwork,
        options: BlockLossOptions,
        names: list[str],
        states: Tensor,
        batch: BlockBatch,
        columns: Tensor,
        counted: Tensor,
        summaries: Tensor | None,
    ) -> None:
        self.network, self.options, self.names = network, options, names
        self.states, vocabulary = states.detach().flatten(0, 1), network.draft_vocabulary
        self.backbone, whole = BackboneParts(network.backbone, vocabulary), BackboneParts(network.backbone)
        self.reads_all = not set(names).isdisjoint(READS_TEACHER)
        is_restricted = options.recipe(method_of(network.config.law)).is_restricted
        self.totals: Tensor | None = None  # [B L], logsumexp of all logits where those of columns are not enough
        self.label_log_p = self.states[:0]  # [B L], log p of the text's next tokens where a term reads it
        numbers = torch.zeros_like(batch.ids)  # of places that count, by the states before them
        before = numbers.scatter_add_(1, (columns - 1).clamp(min=0).flatten(1), counted.flatten(1).long()) > 0
        if self.reads_all and vocabulary is not None and not is_restricted:
            summaries = logit_summaries(whole, states, before) if summaries is None else summaries
            self.totals = summaries.flatten(0, 1)[:, 0]
        if "block" in names:
            following = nn.functional.pad(batch.ids[:, 1:], (0, 1)).masked_fill(~before, -1)
            self.label_log_p = sequence_log_probs(whole, states, following).flatten()

    @torch.no_grad()
    def log_probs(self, columns: Tensor) -> Tensor:
        """Return the backbone's log p [N, m, v] of the tokens in columns [N, m] of all sequences."""
        logits = exact(self.backbone.unembed(self.states[columns - 1]))
        return logits.log_softmax(-1) if self.totals is None else logits - self.totals[columns - 1][..., None]

    def __call__(self, flat: Tensor, tokens: Tensor, counted: Tensor, columns: Tensor) -> Tensor:
        network, config = self.network, self.network.config
        block = Block(network, flat.unflatten(-1, (config.block_size, -1)), tokens[:, 0])  # of hidden [N, S, d]
        rows, logits, joint = block.rows, block.columns, block.law  # [N, m, d], [N, m, v]
        vocabulary, law = network.draft_vocabulary, network.joint_law
        before, text = tokens[:, :-1], tokens[:, 1:]
        codes = text if vocabulary is None else vocabulary.codes(text)
        is_base = isinstance(law, SelectorLaw)  # whose base logits learn, and then its choice
        log_q = logits.log_softmax(-1) if is_base else joint.conditional_log_probs(codes)  # [N, m, v]
        log_p = self.log_probs(columns).to(log_q.dtype) if self.reads_all else log_q
        drafted = counted & (codes < network.draft_size)
        of_labels = at_tokens(log_q, codes)  # [N, m]; any where they have no column

        def choice() -> Tensor:
            wanted = log_p.argmax(-1) if self.reads_all else codes
            has_column = wanted < log_q.shape[-1]
            terms = cast(SelectorLaw, law).choice_terms(rows, logits, before, torch.where(has_column, wanted, 0))
            return torch.where(has_column, terms, 0.0)

        def confidence() -> Tensor:
            embedded = law.embed(before) if config.confidence_reads_token else None
            found, wanted = network.confidence_head(rows, embedded), acceptance(log_p, log_q.detach()).clamp(0, 1)
            return nn.functional.binary_cross_entropy_with_logits(found.to(wanted), wanted, reduction="none")

        terms: dict[str, Callable[[], Tensor]] = {
            "labels": lambda: torch.where(drafted, -of_labels, 0.0),
            "block": lambda: -accepted_along(of_labels, self.label_log_p[columns - 1].to(log_q.dtype), drafted),
            "base": lambda: torch.where(drafted, -at_tokens(logits.log_softmax(-1), codes), 0.0),
            "argmax": lambda: -at_tokens(log_q, log_p.argmax(-1)),
            "l1": lambda: (log_p.exp() - log_q.exp()).abs().sum(-1),
            "selector": choice,
            "confidence": confidence,
        }
        factor = counted.to(log_q.dtype)
        if self.options.weights == "dpace":
            factor = factor * _dpace(of_labels, drafted, counted)
        found = (
            terms[name]()
            if name in terms
            else divergence(name, log_p if name in ACCEPTANCES else log_p.log_softmax(-1), log_q)
            for name in self.names
        )
        values = [torch.where(counted, each, 0.0) * factor for each in found]
        if self.reads_all:
            with torch.no_grad():
                drawn = joint.conditional_log_probs(codes) if "selector" in self.names else log_q
                values.append(torch.where(counted, acceptance(log_p, drawn), 0.0))
        return torch.cat(values, -1)


def _dpace(log_q: Tensor, drafted: Tensor, counted: Tensor) -> Tensor:
    """Return how likely a block is to reach beyond each place, summed over the places after it, detached: [N, m]."""
    chance = torch.where(drafted, log_q.detach().exp(), 0.0)
    chance = torch.where(counted, (1 - _DPACE) * chance + _DPACE, 1.0)
    reached = chance.cumprod(-1) * counted
    return reached.flip(-1).cumsum(-1).flip(-1)
