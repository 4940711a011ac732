"""The loss of block drafters: terms of every place of a block given the text before it, in the columns of all recipes.

Rows of blocks are computed once, with a graph; logits exist for some blocks at a time, whose gradients are made at once
(`chunked_sums`). So memory does not grow with blocks times vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ...configuration.block_losses import READS_TEACHER, BlockLossOptions, BlockRecipe
from ..common.backbone_parts import BackboneParts
from ..common.chunks import LossSegment, chunked_sums
from ..common.outputs import BlockOutput
from ..common.teacher import ACCEPTANCES, acceptance, accepted_along, divergence, logit_summaries, sequence_log_probs
from ..heads.window_distribution import at_tokens, exact
from .batch import BlockBatch, taken
from .laws import SelectorLaw
from .network import BlockNetwork

_DPACE = 0.5
"""Share of certainty in the acceptance that D-PACE assumes."""
METHODS = {"independent": "dflash", "selector": "dflash2"}
"""Methods by law; those of all others is "dspark"."""


def method_of(law: str) -> str:
    """Return the method whose recipe a law has where none is named."""
    return METHODS.get(law, "dspark")


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
    """Return the loss of blocks, and their terms.

    Args:
        network: The drafter.
        hidden: [B, A, S, d], `block_rows`.
        batch: The batch.
        states: [B, L, D], the backbone's last hidden states.
        options: How the loss is computed.
        items: Places that count over all micro-batches, [m]; None: those of the batch.
        summaries: [B, L, 2], the `logit_summaries` of the states; None: computed where they are read.
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
    teacher = BlockTeacher(network, states, batch, columns, counted, recipe, set(names), summaries)
    tokens = torch.cat([batch.anchors[..., None], columns], -1)
    tokens = taken(batch.ids, tokens)  # [B, A, m + 1], b first
    terms = BlockTerms(network, teacher, options, list(names))
    shares = [weight * weights for weight in names.values()]
    shares = torch.cat([*shares, *[torch.zeros_like(weights)] * teacher.reads_all])
    starts = torch.arange(len(columns), device=columns.device)[:, None, None] * batch.ids.shape[1]
    arguments = (tokens, counted, columns + starts)  # columns of all sequences, one after the other
    part = LossSegment(hidden.flatten(-2), arguments, shares, scored=counted.any(-1))
    heads = nn.ModuleList([law, *([network.confidence_head] if config.has_confidence else [])])
    numbers = size * network.draft_size * (getattr(law, "rank", 1) + 1 + teacher.reads_all)
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


class BlockTeacher:
    """What the backbone says of the tokens that blocks predict.

    Attributes:
        reads_all: Whether its distributions are read.
    """

    def __init__(
        self,
        network: BlockNetwork,
        states: Tensor,
        batch: BlockBatch,
        columns: Tensor,
        counted: Tensor,
        recipe: BlockRecipe,
        names: set[str],
        summaries: Tensor | None,
    ) -> None:
        vocabulary = network.draft_vocabulary
        self.backbone = BackboneParts(network.backbone, vocabulary)
        self.states, self.totals = states.detach().flatten(0, 1), None
        self.reads_all = not names.isdisjoint(READS_TEACHER)
        self.log_p: Tensor | None = None
        if "block" not in names and (vocabulary is None or recipe.is_restricted or not self.reads_all):
            return
        whole = BackboneParts(network.backbone)
        numbers = torch.zeros_like(batch.ids)  # of places that count, by the states before them
        before = numbers.scatter_add_(1, (columns - 1).clamp(min=0).flatten(1), counted.flatten(1).long()) > 0
        if self.reads_all and vocabulary is not None and not recipe.is_restricted:
            summaries = logit_summaries(whole, states, before) if summaries is None else summaries
            self.totals = summaries.flatten(0, 1)[:, 0]  # [B L]
        if "block" in names:
            following = nn.functional.pad(batch.ids[:, 1:], (0, 1)).masked_fill(~before, -1)
            self.log_p = sequence_log_probs(whole, states, following).flatten()

    @torch.no_grad()
    def log_probs(self, columns: Tensor) -> Tensor:
        """Return log p [N, m, v] of the tokens in columns [N, m] of all sequences."""
        logits = exact(self.backbone.unembed(self.states[columns - 1]))
        return logits.log_softmax(-1) if self.totals is None else logits - self.totals[columns - 1][..., None]


@dataclass
class Places:
    """The places of some blocks.

    Attributes:
        rows: [N, m, d], the rows that draft them.
        logits: [N, m, v], their base logits.
        log_q: [N, m, v], what is learned, given the text before.
        log_p: [N, m, v], the backbone's; None where no term reads it.
        label_log_p: [N, m], log p of the text's tokens; None where no term reads it.
        before: Ids [N, m] of the tokens before them.
        codes: Columns [N, m] of the text's tokens.
        drafted: [N, m] bool, places that count and whose token has a column.
    """

    rows: Tensor
    logits: Tensor
    log_q: Tensor
    log_p: Tensor | None
    label_log_p: Tensor | None
    before: Tensor
    codes: Tensor
    drafted: Tensor

    @property
    def taught(self) -> Tensor:
        """Return `log_p`, which a term reads."""
        assert self.log_p is not None
        return self.log_p

    @cached_property
    def of_labels(self) -> Tensor:
        """Return log q of the text's tokens, [N, m]; any where they have no column."""
        return at_tokens(self.log_q, self.codes)


class BlockTerms:
    """Makes the terms of some blocks from their rows: [N, n m], n terms and, if p is known, the acceptance."""

    def __init__(
        self, network: BlockNetwork, teacher: BlockTeacher, options: BlockLossOptions, names: list[str]
    ) -> None:
        self.network, self.teacher, self.options, self.names = network, teacher, options, names

    def __call__(self, flat: Tensor, tokens: Tensor, counted: Tensor, columns: Tensor) -> Tensor:
        network, config, teacher = self.network, self.network.config, self.teacher
        hidden = flat.unflatten(-1, (config.block_size, -1))  # [N, S, d]
        rows = hidden[:, config.first_row :]  # [N, m, d]
        anchor = hidden[:, 0] if config.first_row else None
        logits, vocabulary = network.draft_logits(rows), network.draft_vocabulary
        before, text = tokens[:, :-1], tokens[:, 1:]
        codes = text if vocabulary is None else vocabulary.codes(text)
        law = network.joint_law.distribution(rows, logits, tokens[:, 0], anchor, vocabulary)
        if isinstance(network.joint_law, SelectorLaw):  # whose base logits learn, and then its choice
            log_q = logits.log_softmax(-1)
        else:
            log_q = law.conditional_log_probs(codes)  # [N, m, v]
        log_p = teacher.log_probs(columns).to(log_q.dtype) if teacher.reads_all else None
        labels = None if teacher.log_p is None else teacher.log_p[columns - 1].to(log_q.dtype)
        drafted = counted & (codes < network.draft_size)
        places = Places(rows, logits, log_q, log_p, labels, before, codes, drafted)
        factor = counted.to(log_q.dtype)
        if self.options.weights == "dpace":
            factor = factor * _dpace(places.of_labels, drafted, counted)
        values = [torch.where(counted, self._term(name, places), 0.0) * factor for name in self.names]
        if log_p is not None:
            with torch.no_grad():
                drawn = law.conditional_log_probs(codes) if "selector" in self.names else log_q
                values.append(torch.where(counted, acceptance(log_p, drawn), 0.0))
        return torch.cat(values, -1)

    def _term(self, name: str, places: Places) -> Tensor:
        """Return a term of all places, [N, m]."""
        network, log_q = self.network, places.log_q
        law = network.joint_law
        if name == "labels":
            return torch.where(places.drafted, -places.of_labels, 0.0)
        if name == "block":
            assert places.label_log_p is not None
            return -accepted_along(places.of_labels, places.label_log_p, places.drafted)
        if name == "selector":
            assert isinstance(law, SelectorLaw)
            wanted = places.codes if places.log_p is None else places.log_p.argmax(-1)
            has_column = wanted < log_q.shape[-1]
            terms = law.choice_terms(places.rows, places.logits, places.before, torch.where(has_column, wanted, 0))
            return torch.where(has_column, terms, 0.0)
        if name == "argmax":
            return -at_tokens(log_q, places.taught.argmax(-1))
        if name == "l1":
            return (places.taught.exp() - log_q.exp()).abs().sum(-1)
        if name == "confidence":
            embedded = law.embed(places.before) if network.config.confidence_reads_token else None
            found, wanted = network.confidence_head(places.rows, embedded), acceptance(places.taught, log_q.detach())
            return nn.functional.binary_cross_entropy_with_logits(
                found.to(wanted), wanted.clamp(0, 1), reduction="none"
            )
        return divergence(name, places.taught if name in ACCEPTANCES else places.taught.log_softmax(-1), log_q)


def _dpace(log_q: Tensor, drafted: Tensor, counted: Tensor) -> Tensor:
    """Return how likely a block is to reach beyond each place, summed over the places after it, detached: [N, m]."""
    chance = torch.where(drafted, log_q.detach().exp(), 0.0)
    chance = torch.where(counted, (1 - _DPACE) * chance + _DPACE, 1.0)
    reached = chance.cumprod(-1) * counted
    return reached.flip(-1).cumsum(-1).flip(-1)


def pooled_loss(options: BlockLossOptions, law: str, sums: Tensor, counts: Tensor) -> Tensor:
    """Return the loss of data from summed terms and places that count, [m] each."""
    return (sums * place_weights(options, options.recipe(method_of(law)), counts.to(sums), 1)).sum()
