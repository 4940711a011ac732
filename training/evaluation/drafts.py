"""Distributions of drafts and of the backbone along known sequences, and measures of them.

The verifier's distribution of the token at depth j is the backbone's own, j - 1 positions further on: one forward gives
it for every depth. The drafter's is conditioned on the true tokens before it. Nothing is drawn; `expected` makes calls
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import DynamicCache

from ...configuration.fields import requested_states
from ...modeling.common.backbone_parts import BackboneParts
from ...modeling.common.chunks import LOGITS_PER_CHUNK
from ...modeling.deepseek.main_model import run_main
from ...modeling.deepseek.model import DeepSeekMTP
from ...modeling.eagle.losses import TrainingBatch
from ...modeling.eagle.model import EagleHead
from ...modeling.evabyte.model import EvaByteForMTPC
from ...modeling.heads.attached import MTPHeads
from ...modeling.heads.losses import IGNORE, depth_targets, tokens_ahead
from .expected import GREEDY_RULE, SAMPLED, ExpectedCalls, acceptance_along

Batch = Mapping[str, torch.Tensor]
_INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True)
class DraftedProbs:
    """Some positions of a batch, and the distributions of the tokens that are drafted after them.

    Attributes:
        rows: [N] int64, index of the sequence of each position.
        columns: [N] int64, its index in the sequence.
        draft: [N, m, v], log-probabilities of the drafter for drafts 1 to m, given the true tokens before each.
        target: [N, m, v], the backbone's logits for the same tokens.
        tokens: [N, m] int64, the tokens that follow.
        scored: [N, m] bool, True where that token and all before it in the draft are targets.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    draft: torch.Tensor
    target: torch.Tensor
    tokens: torch.Tensor
    scored: torch.Tensor


def has_probs(model: object) -> bool:
    """Return whether `drafted_probs` supports a model; PTP's slots have no distribution without their uniforms."""
    return isinstance(model, (EvaByteForMTPC, MTPHeads, DeepSeekMTP, EagleHead))


def usual_drafts(model: Any) -> int:
    """Return the default length of a model's drafts; 1 for modules that draft none."""
    return model.window - 1 if isinstance(model, EvaByteForMTPC) else max(1, model.default_draft())


def drafted_probs(model: Any, batch: Batch, length: int | None = None) -> Iterator[DraftedProbs]:
    """Yield the distributions of all drafts along a batch of sequences, some positions at a time.

    The first drafted token is two tokens ahead of a position: the next one is the verifier's own.

    Args:
        model: An `EvaByteForMTPC`, `MTPHeads`, `EagleHead` (attached) or `DeepSeekMTP`, not wrapped.
        batch: `input_ids` and `labels` [B, L] and, optionally, `attention_mask` and `position_ids`.
        length: m, tokens per draft; None: `usual_drafts`.

    Raises:
        TypeError: Another model.
    """
    if not has_probs(model):
        raise TypeError(
            f"a {type(model).__name__} has no distributions of drafts before they are drawn; measure what it generates"
        )
    length = length or usual_drafts(model)
    if isinstance(model, EagleHead):
        return _of_eagle(model, batch, length)
    return (_of_modules if isinstance(model, DeepSeekMTP) else _of_heads)(model, batch, length)


def _inputs(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in _INPUTS if batch.get(name) is not None}


def _targets(batch: Batch, window: int) -> torch.Tensor:
    return depth_targets(batch["labels"], window, batch.get("attention_mask"), batch.get("position_ids"))


def _of_heads(model: Any, batch: Batch, length: int) -> Iterator[DraftedProbs]:
    inputs, backbone = _inputs(batch), model.backbone if isinstance(model, MTPHeads) else model
    padding = inputs.get("attention_mask"), inputs.get("position_ids")
    if backbone is model:
        options = {"output_hidden_states": requested_states(model.hidden_layers), "logits_to_keep": 1}
        states = model(**inputs, use_cache=False, **options).hidden_states
    else:
        states = model._run_backbone(inputs["input_ids"], *padding).hidden_states
    features, unembed = model.features(states, *padding), BackboneParts(backbone).unembed
    targets = _targets(batch, length + 1)
    tokens = torch.where(targets == IGNORE, tokens_ahead(batch["input_ids"], length + 1, 0), targets)

    def probs(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        window = tokens[rows, columns]
        after = model.distribution_after(features[rows, columns], window[:, 0], length)
        drafts = nn.functional.pad(window[:, 1:], (0, after.window - length))  # trees of circuits keep whole windows
        return after.conditional_log_probs(drafts)[:, :length].float()

    yield from _chunks(probs, unembed, states[-1], targets, tokens, model.config.vocab_size)


def _chunks(
    probs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    unembed: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    targets: torch.Tensor,
    tokens: torch.Tensor,
    vocab_size: int,
) -> Iterator[DraftedProbs]:
    """Yield the positions with a target at depth 2, in chunks whose logits [N, m, vocab_size] are small.

    `probs` maps indices of rows and columns [N] to the drafter's log-probabilities [N, m, v]; `unembed` the backbone's
    last states [B, L, d] to its logits. Targets (-100 where nothing is scored) and tokens have shape [B, L, m + 1].
    """
    drafts, last = targets.shape[-1] - 1, states.shape[1] - 1
    scored = (targets != IGNORE).long().cumprod(-1).bool()[..., 1:]
    if drafts < 1 or not scored.any():
        return
    rows, columns = scored[..., 0].nonzero(as_tuple=True)
    size = max(1, LOGITS_PER_CHUNK // (drafts * vocab_size))
    ahead = torch.arange(1, drafts + 1, device=columns.device)
    for row, column in zip(rows.split(size), columns.split(size)):
        seen = (column[:, None] + ahead).clamp(max=last)
        yield DraftedProbs(
            row,
            column,
            probs(row, column),
            unembed(states[row[:, None], seen]).float(),
            tokens[row, column, 1:],
            scored[row, column],
        )


def _of_modules(model: DeepSeekMTP, batch: Batch, length: int) -> Iterator[DraftedProbs]:
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    options = {"use_cache": False} | ({} if mask is None else {"attention_mask": mask})
    main = run_main(model.main, batch["input_ids"], None, positions, options)
    hidden = main.outputs.last_hidden_state
    embeds = model.module_inputs(main, batch["input_ids"])
    chain = model.chain(main.state, embeds, mask, main.position_ids, length)[1:]
    states = _stacked(chain, hidden.shape[1])
    targets = _targets(batch, length + 1)

    def probs(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        drafted = states[rows, columns].unbind(1)
        logits = [model.readout_of(depth)(state) for depth, state in enumerate(drafted, start=1)]
        return torch.stack(logits, 1).float().log_softmax(-1)

    size = model.config.get_text_config().vocab_size
    yield from _chunks(probs, model.readout, hidden, targets, targets.clamp(min=0), size)


def _stacked(steps: list[torch.Tensor], length: int) -> torch.Tensor:
    """Return the states [B, R, d] of several steps as one tensor [B, length, m, d], 0 beyond their ends."""
    return torch.stack([nn.functional.pad(step, (0, 0, 0, length - step.shape[1])) for step in steps], dim=2)


def _of_eagle(head: EagleHead, batch: Batch, length: int) -> Iterator[DraftedProbs]:
    """Yield for an EAGLE head: row t of step i - 1 drafts token t + 1 + i, from the head's outputs as in decoding."""
    inputs = _inputs(batch)
    wanted = requested_states(head.learning_layers)
    outputs = head.backbone(**inputs, use_cache=False, logits_to_keep=1, output_hidden_states=wanted, return_dict=True)
    states, features = outputs.hidden_states[-1], head.fuse(outputs.hidden_states)
    mask = inputs.get("attention_mask")
    whole = TrainingBatch.of(inputs["input_ids"], batch["labels"], mask, inputs.get("position_ids"), states)
    targets = _targets(batch, length + 1)
    unrolled = _stacked(_unrolled(head, features, whole, length), states.shape[1])
    ids = head.draft_ids

    def probs(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        drafted = head.draft_logits(unrolled[rows, columns]).float().log_softmax(-1)
        full = drafted.new_full((*drafted.shape[:-1], head.config.vocab_size), -torch.inf)
        return full.index_copy_(-1, ids, drafted)

    yield from _chunks(probs, head.backbone_logits, states, targets, targets.clamp(min=0), head.config.vocab_size)


def _unrolled(head: EagleHead, features: torch.Tensor, batch: TrainingBatch, steps: int) -> list[torch.Tensor]:
    """Return the outputs of steps 0, 1, ..., [B, R, d] each; a row attends to step 0 up to its column, and itself."""
    rows, cache, states = batch.num_rows, DynamicCache(), []
    if not rows:
        return [features[:, :0]] * steps
    mask = batch.visible(0, rows)
    own = torch.eye(rows, dtype=torch.bool, device=mask.device).expand(len(mask), 1, -1, -1)
    features = features[:, :rows]
    for step in range(steps):
        ids = batch.ahead(batch.input_ids, 0, rows, 1 + step)
        features = head.rows(features, ids, batch.positions[:, :rows] + step, mask, cache)
        states.append(features)
        mask = torch.cat([mask, own], dim=-1)
    return states


TOP_K = (1, 5)
"""Numbers of the drafter's likeliest tokens for accuracies."""


@dataclass
class DraftMeasures:
    """Measures along sequences: sums by draft position (the j-th draft is j + 1 tokens ahead), and expected calls.

    Attributes:
        temperature: Of the target and the drafter; 0: greedy.
        length: m, tokens per draft; None: `usual_drafts`.
        sums: By name, [m] float64: `loss` and `top_k` of the drafter, `backbone_loss` of its target.
        counts: [m] float64, positions whose first j drafted tokens are all targets.
        calls: By the rule of verification; sampled drafts have both rules.
    """

    temperature: float = 1.0
    length: int | None = None
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: torch.Tensor | None = None
    calls: dict[str, ExpectedCalls] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, model: Any, batch: Batch) -> DraftMeasures:
        """Add a batch of sequences, in evaluation mode; arguments as for `drafted_probs`. Return the measures."""
        rules, was_training = SAMPLED if self.temperature else GREEDY_RULE, model.training
        positions = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
        accepted: dict[str, torch.Tensor] = {}
        model.eval()
        try:
            for probs in drafted_probs(model, batch, self.length):
                self._add_positions(probs)
                at = probs.rows.cpu(), probs.columns.cpu()
                positions[at] = True
                for rule in rules:
                    drafted = probs.draft, probs.target, probs.tokens
                    shares = acceptance_along(*drafted, self.temperature, rule).cpu()
                    whole = accepted.setdefault(rule, shares.new_zeros(*positions.shape, shares.shape[-1]))
                    whole[at] = shares
        finally:
            model.train(was_training)
        calls = {rule: ExpectedCalls.along(whole, positions) for rule, whole in accepted.items()}
        self._merge(DraftMeasures(calls=calls))
        return self

    def _add_positions(self, probs: DraftedProbs) -> None:
        token = probs.tokens[..., None]
        chosen = probs.draft.gather(-1, token)
        rank = (probs.draft > chosen).sum(-1)
        terms = {
            "loss": -chosen[..., 0],
            "backbone_loss": -probs.target.log_softmax(-1).gather(-1, token)[..., 0],
            **{f"top_{k}": (rank < k).float() for k in TOP_K},
        }
        sums = {name: torch.where(probs.scored, values.double(), 0.0).sum(0).cpu() for name, values in terms.items()}
        self._merge(DraftMeasures(sums=sums, counts=probs.scored.sum(0).double().cpu()))

    def _merge(self, other: DraftMeasures) -> None:
        if other.counts is not None:
            self.counts = other.counts if self.counts is None else self.counts + other.counts
        for name, values in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + values
        for rule, calls in other.calls.items():
            self.calls[rule] = self.calls[rule] + calls if rule in self.calls else calls

    def reduced(self) -> DraftMeasures:
        """Return the measures of all processes; every one of them calls this."""
        total = DraftMeasures(self.temperature, self.length)
        for part in gather_object([self]):
            total._merge(part)
        return total

    def means(self) -> dict[str, list[float]]:
        """Return means by draft position, up to the last one with targets; an infinite loss stays infinite."""
        if self.counts is None:
            return {}
        drafts = int((self.counts > 0).sum())
        return {name: (values[:drafts] / self.counts[:drafts]).tolist() for name, values in self.sums.items()}


def text_of(prompts: torch.Tensor, new: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return prompts [B, P] and outputs after them [B, T + 1] as a batch that scores the outputs."""
    return {"input_ids": torch.cat([prompts, new], 1), "labels": torch.cat([torch.full_like(prompts, IGNORE), new], 1)}


@torch.no_grad()
def rank_accuracies(model: Any, batches: Iterable[Batch], ranks: int = 10, temperature: float = 0.0) -> torch.Tensor:
    """Return accuracies by depth and rank, given the true tokens before (Medusa, arXiv 2401.10774, section 2.3.3).

    `choices_from_accuracies` makes a tree of them, which `generate` takes as `draft_tree`:

        >>> choices = choices_from_accuracies(rank_accuracies(heads, batches), num_nodes=24)
        >>> out = backbone.generate(**inputs, assistant_model=heads, draft_tree=choices)

    Args:
        model: A drafter, see `drafted_probs`; outputs of its backbone measure future drafts.
        batches: `input_ids` and `labels` [B, L] and, optionally, `attention_mask` and `position_ids`.
        ranks: R, proposals per depth; at most the size of the vocabulary.
        temperature: Temperature of the target. 0: whether its likeliest token is proposed. Else: the probability that
            it draws the proposal, which is that of accepting it in a tree of fixed shape.

    Returns:
        [m, R] float64, m depths; the first drafted token is two tokens ahead.

    Raises:
        ValueError: No position of the batches is a target, or a negative temperature.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    was_training = model.training
    model.eval()
    hits, counts = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for probs in drafted_probs(model, batch):
            proposed = probs.draft.topk(min(ranks, probs.draft.shape[-1])).indices
            if temperature:
                shares = (probs.target / temperature).softmax(-1).gather(-1, proposed).double()
            else:
                shares = (probs.target.argmax(-1, keepdim=True) == proposed).double()
            hits = hits + (shares * probs.scored[..., None]).sum(0).cpu()
            counts = counts + probs.scored.sum(0).double().cpu()
    model.train(was_training)
    if not hits.dim():
        raise ValueError("rank_accuracies: no position of the batches is a target; give labels that are not all -100")
    return hits / counts.clamp(min=1)[:, None]
