"""Losses of all drafters by their definitions: one document at a time, all logits at once, through autograd alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, smooth_l1_loss
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.every_model import llama
from tests.families import family_model
from tests.training.conftest import small_model
from tokenahead import EagleHead, MTPHeads
from tokenahead.configuration.loss_options import DIVERGENCES
from tokenahead.modeling.common.teacher import call_weights
from tokenahead.modeling.heads.family import window_distribution
from tokenahead.modeling.heads.joint import JointMTPModel

IGNORE = -100
Sums = tuple[Tensor, Tensor]
"""Summed terms and targets per depth of one document, [n] each."""


def distance(kind: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """D(p, q) of distributions [..., v]."""
    p, q = log_p.exp(), log_q.exp()
    alpha, kl = torch.minimum(p, q).sum(-1), (p * (log_p - log_q)).sum(-1)
    if kind == "lk_kl":
        return (-3 * alpha.detach()).exp() * kl - alpha.log()
    return {
        "cross_entropy": -(p * log_q).sum(-1),
        "kl": kl,
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "tv": 1 - alpha,
        "lk": -alpha.log(),
    }[kind]


def ahead(values: Tensor, depths: Sequence[int], fill: float = 0) -> Tensor:
    """The values [L, ..] that many positions later, [L, n, ..]."""
    return torch.stack(
        [pad(values[k:].movedim(0, -1), (0, min(k, len(values))), value=fill).movedim(-1, 0) for k in depths], 1
    )


def taught(
    log_q: Tensor, log_p: Tensor, labels: Tensor, options, kept: Tensor, is_known: Tensor | None = None
) -> Tensor:
    """Terms of depths 2, 3, ... [L, m] of log q over the tokens `kept` [L, m, v] and the backbone's log p [L, V].

    `is_known` [L, m]: where there is a distance, if that is not by the target.
    """
    depths = range(2, 2 + log_q.shape[1])
    targets, next_p = ahead(labels, depths, IGNORE), ahead(log_p, [depth - 1 for depth in depths])
    scored, is_drafted = targets != IGNORE, torch.isin(targets, kept)
    columns = torch.where(is_drafted, torch.searchsorted(kept, targets), 0)
    likelihood = torch.where(is_drafted, log_q.gather(-1, columns[..., None])[..., 0], 0.0)
    share = options.label_weight
    if options.target == "labels":
        return torch.where(scored, -likelihood, 0.0)
    if options.divergence == "block":
        starts = (ahead(labels, [1, 2], IGNORE) != IGNORE).all(1, keepdim=True)
        is_drafted = is_drafted & starts
        chosen_p = next_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        accepted = torch.where(is_drafted, likelihood - chosen_p, 0.0).cumsum(1).cummin(1).values.clamp(max=0).exp()
        accepted = accepted * is_drafted.long().cumprod(1)
        weights = starts.to(accepted).expand_as(accepted)
        if options.position_weighting == "expected_calls":
            weights = call_weights(accepted.detach()[None], starts[None, :, 0])[0]
        return -(1 - share) * weights * accepted - share * likelihood * is_drafted
    next_p = next_p[..., kept]
    if options.divergence in ("cross_entropy", "kl", "reverse_kl"):
        next_p = next_p.log_softmax(-1)
    adds = is_drafted if is_known is None else is_known
    terms = (1 - share) * torch.where(adds, distance(options.divergence, next_p, log_q), 0.0) - share * likelihood
    return torch.where(scored, terms, 0.0)


def summed(log_first: Tensor, later: Tensor, labels: Tensor, options, kept: Tensor) -> Sums:
    """The likelihood of depth 1, from log q [L, v] over the tokens `kept`, before the terms of the others [L, m]."""
    targets = ahead(labels, range(1, 2 + later.shape[1]), IGNORE)
    next_ids = targets[:, 0].contiguous()
    first = torch.where(torch.isin(next_ids, kept), torch.searchsorted(kept, next_ids), -1)
    likelihood = log_first.gather(-1, first.clamp(min=0)[:, None])[:, 0]
    terms = torch.cat([torch.where(first >= 0, -likelihood, 0.0)[:, None], later], 1)
    return terms.sum(0), counted(targets, options)


def counted(targets: Tensor, options) -> Tensor:
    """Targets per depth; of the block loss those of depth 2, where a cycle may begin, for all later ones."""
    counts = (targets != IGNORE).sum(0)
    return torch.cat([counts[:1], counts[1:2].expand(len(counts) - 1)]) if options.divergence == "block" else counts


def states_of(drafter, ids: Tensor) -> Sequence[Tensor]:
    """All hidden states of the backbone."""
    return drafter.backbone(ids[None], output_hidden_states=True, use_cache=False).hidden_states


def of_window(drafter, ids: Tensor, labels: Tensor) -> Sums:
    """Heads apart, and EvaByte's."""
    if isinstance(drafter, MTPHeads):
        states = states_of(drafter, ids)
        features, parts, vocabulary = drafter.features(states)[0], drafter._parts(), drafter.draft_vocabulary
        log_p = drafter.backbone.get_output_embeddings()(states[-1][0]).detach().log_softmax(-1)
    else:
        features, parts, vocabulary = drafter.model(ids[None]).last_hidden_state[0], None, None
        log_p = drafter.lm_head(features).detach().log_softmax(-1)
    config, kept = drafter.head_config, torch.arange(log_p.shape[-1])
    tokens = ahead(ids, range(1, 1 + config.num_depths))
    if vocabulary is not None:
        kept, tokens = vocabulary.ids, vocabulary.codes(tokens)
    distribution = window_distribution(drafter.whole_head, config, features, parts)
    distribution.codes = vocabulary
    log_q, options = distribution.conditional_log_probs(tokens), config.loss_options
    options.target = config.loss_target
    return summed(log_q[:, 0], taught(log_q[:, 1:], log_p, labels, options, kept), labels, options, kept)


def of_joint(drafter, ids: Tensor, labels: Tensor) -> Sums:
    """Heads whose backbone learns, too: its own loss comes last."""
    heads = getattr(drafter, "heads", drafter)
    sums, counts = of_window(heads, ids, labels)
    main = getattr(drafter, "backbone", drafter)
    log_p = main.lm_head(main.model(ids[None]).last_hidden_state[0]).log_softmax(-1)
    own, count = summed(log_p, log_p[:, :0], labels, heads.head_config.loss_options, torch.arange(log_p.shape[-1]))
    return torch.cat([sums, own]), torch.cat([counts, count])


def of_modules(drafter, ids: Tensor, labels: Tensor) -> Sums:
    """Sequential modules."""
    hidden, embeds = drafter.main.model(ids[None]).last_hidden_state, drafter.main.get_input_embeddings()(ids[None])
    main, *later = drafter.chain(hidden, embeds, None, None, drafter.window - 1)
    log_p = drafter.readout(main[0]).log_softmax(-1)
    logits = [pad(drafter.readout(state[0]), (0, 0, 0, len(ids) - state.shape[1])) for state in later]
    log_q, kept, options = torch.stack(logits, 1).log_softmax(-1), torch.arange(log_p.shape[-1]), drafter.loss_options
    return summed(log_p, taught(log_q, log_p.detach(), labels, options, kept), labels, options, kept)


def of_eagle(drafter: EagleHead, ids: Tensor, labels: Tensor) -> Sums:
    """All steps of all rows of an EAGLE head at once."""
    options, states = drafter.loss_options.resolved(drafter.config.version), states_of(drafter, ids)
    rows, last, outputs, cache = len(ids) - 2, states[-1][0].detach(), [], DynamicCache()
    mask, places = torch.ones(rows, rows).tril().bool(), torch.arange(rows)
    features = drafter.fuse(states)[:, :rows]
    for step in range(options.steps):
        features = features.detach() if step and options.objective == "hass" else features
        following = ids[(places + 1 + step).clamp(max=len(ids) - 1)][None]
        features = drafter.rows(features, following, places[None] + step, mask[None, None], cache)
        outputs.append(features[0])
        mask = torch.cat([mask, torch.eye(rows).bool()], 1)
    features = pad(torch.stack(outputs, 1), (0, 0, 0, 0, 0, 2))  # [L, S, d]
    log_q, log_p = drafter.draft_logits(features).log_softmax(-1), drafter.backbone_logits(last).log_softmax(-1)
    depths, kept = range(1, 1 + options.steps), drafter.draft_ids.sort().values
    log_q = log_q[..., drafter.draft_ids.argsort()]
    is_part = options.objective == "ttt" or len(kept) < log_p.shape[-1]
    is_known = torch.isin(log_p.argmax(-1), kept) if is_part else torch.ones(len(ids)).bool()
    learned = taught(log_q, log_p, labels, options, kept, ahead(is_known, depths, False))
    scored = ahead(labels, [depth + 1 for depth in depths], IGNORE) != IGNORE
    counts, is_block = scored.sum(0), options.divergence == "block"
    if is_block or options.objective == "hass":
        counts = counts[:1].expand(len(counts))
    if options.objective == "ttt":
        return learned.sum(0), counts
    others = smooth_l1_loss(features, ahead(last, depths), reduction="none").mean(-1)
    if options.objective == "eagle1":
        return (0.1 * learned + others * scored).sum(0), counts
    drafted_p = log_p[:, kept] if options.divergence in ("tv", "lk", "lk_kl") else log_p[:, kept].log_softmax(-1)
    best, columns = ahead(drafted_p, depths).exp().topk(options.topk, -1)
    others = (others - options.topk_weight * (best * log_q.gather(-1, columns)).sum(-1)) * scored
    again = others[0] if is_block else others[0] + 0.1 * learned[0]  # a document's first row, in all later steps
    return (0.1 * learned + others).sum(0) + again.cumsum(0) - again, counts


@dataclass(frozen=True)
class Drafter:
    """How one is made with options of its loss, its plain sums of a document, and the weights of its depths."""

    make: Callable[[dict], torch.nn.Module]
    sums: Callable[[torch.nn.Module, Tensor, Tensor], Sums]
    weights: Sequence[float]
    block_weights: Callable[[float], Sequence[float]] = lambda share: [1.0] * STEPS

    def loss(self, model: torch.nn.Module, rows: list[dict[str, Tensor]], options: dict) -> Tensor:
        """The loss of some documents."""
        found = zip(*(self.sums(model, row["input_ids"], row["labels"]) for row in rows))
        sums, counts = (torch.stack(each).sum(0) for each in found)
        weights = self.weights
        if options.get("divergence") == "block":
            weights = self.block_weights(options.get("label_weight", 0.0))
        return (torch.tensor(weights, dtype=sums.dtype) * sums / counts.clamp(min=1)).sum()


STEPS, HALF = 3, torch.arange(0, 24, 2)
SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)


def _heads(weights: Sequence[float], **options) -> Drafter:
    def make(loss: dict) -> MTPHeads:
        return MTPHeads.from_backbone(llama(**SIZES), window=3, loss_options=loss, **options)

    return Drafter(make, of_window, weights, lambda share: [share, 1.0, 1.0])


def _eagle(version: int, objective: str, **options) -> Drafter:
    def make(loss: dict) -> EagleHead:
        how = {"objective": objective} | ({} if objective == "eagle1" else {"steps": STEPS})
        given = {"aux_layers": [1, 2]} if version == 3 else {}
        loss = how | loss | ({"topk": 3} if objective == "hass" else {})
        return EagleHead.from_backbone(
            llama(num_hidden_layers=3, **SIZES), version=version, loss_options=loss, **given, **options
        )

    weights = {"ttt": [1.0, 0.8, 0.64], "hass": [1.0] * STEPS, "eagle1": [1.0]}[objective]
    return Drafter(make, of_eagle, weights, lambda share: [1.0] * len(weights))


def _modules(depths: int, **options) -> Drafter:
    def make(loss: dict) -> torch.nn.Module:
        model = family_model("llama", num_nextn_predict_layers=2)
        model.loss_options.update(**options, **loss)
        return model

    weights = [1.0] + [0.3 / depths] * depths
    return Drafter(make, of_modules, weights, lambda share: weights)


def _joint(loss: dict) -> JointMTPModel:
    return JointMTPModel(MTPHeads.from_backbone(llama(**SIZES), window=3, head_type="layer", loss_options=loss))


def _evabyte(loss: dict) -> torch.nn.Module:
    model = small_model()
    model.set_head(head_type="btree", rank=2, window=3, loss_options=loss)
    return model


DISCOUNTED = [each / 2.71 for each in (1.0, 0.9, 0.81)]
DRAFTERS = {
    "ff": _heads(DISCOUNTED, unembedding="own"),
    "cp": _heads(DISCOUNTED, head_type="cp", rank=2),
    "hmm": _heads(DISCOUNTED, head_type="hmm", rank=2),
    "btree": _heads(DISCOUNTED, head_type="btree", rank=2),
    "medusa": _heads([0.0, 0.8, 0.64], head_type="medusa"),
    "hydra": _heads([0.0, 1.0, 1.0], head_type="hydra"),
    "layer": _heads([1.0, 1.0, 1.0], head_type="layer"),
    "draft layers": _heads(DISCOUNTED, draft_layers=1),
    "half of cp": _heads(DISCOUNTED, head_type="cp", rank=2, draft_ids=HALF),
    "half of hydra": _heads([0.0, 1.0, 1.0], head_type="hydra", draft_ids=HALF),
    "joint": Drafter(_joint, of_joint, [0.0, 1.0, 1.0, 1.0], lambda share: [0.0, 1.0, 1.0, 1.0]),
    "eagle 3": _eagle(3, "ttt"),
    "half of eagle 3": _eagle(3, "ttt", draft_ids=HALF.flip(0)),
    "eagle 1": _eagle(1, "eagle1"),
    "hass": _eagle(1, "hass"),
    "half of hass": _eagle(1, "hass", draft_ids=HALF),
    "modules": _modules(2),
    "unrolled modules": _modules(3, unroll_steps=3),
    "evabyte": Drafter(_evabyte, of_joint, [*DISCOUNTED, 1.0], lambda share: [share, 1.0, 1.0, 1.0]),
}
TEACHER = {"target": "teacher"}
OBJECTIVES = {
    "labels": {"target": "labels"},
    **{kind: TEACHER | {"divergence": kind} for kind in DIVERGENCES},
    "kl and labels": TEACHER | {"divergence": "kl", "label_weight": 0.3},
    "block": TEACHER | {"divergence": "block"},
    "block by calls": TEACHER | {"divergence": "block", "position_weighting": "expected_calls", "label_weight": 0.2},
}


def exact_norms(patch: pytest.MonkeyPatch) -> None:
    """Llama's norms in the dtype of the model; transformers computes them in float32."""

    def norm(self: LlamaRMSNorm, states: Tensor) -> Tensor:
        return self.weight * torch.nn.functional.rms_norm(states, self.weight.shape, None, self.variance_epsilon)

    patch.setattr(LlamaRMSNorm, "forward", norm)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of all parameters that have one."""
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def check(loss: torch.Tensor, found: dict, wanted: tuple[torch.Tensor, dict], bound: float, case: str = "") -> None:
    """Compare a loss, and gradients by norm."""
    assert abs(loss - wanted[0]) <= bound * abs(wanted[0]), case
    for key, gradient in wanted[1].items():
        assert key in found or not gradient.any(), (case, key)
        assert (found.get(key, 0) - gradient).norm() <= bound * gradient.norm(), (case, key)
