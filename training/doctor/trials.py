"""What a drafter would accept if it were read in another way: trials, each along the very same texts.

A trial undoes one fault for as long as it lasts: it changes what a drafter reads, a field of its config, or the order
of its tensors, and nothing else. The drafts along known texts then say which convention the drafter learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, permutations
from math import factorial, isclose
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedModel
from transformers.activations import ACT2FN

from ...configuration.block import BlockDrafterConfig
from ...configuration.fields import field
from ...generation.backbone.wrapped_models import Kwargs, untyped
from ...modeling import BlockDrafter, EagleHead, MTPHeads
from ...modeling.block.laws import MarkovLaw, SelectorLaw
from ...modeling.block.layouts import default_ids
from ...modeling.common.foreign import layer_fields
from ...modeling.eagle.conversion import default_aux_layers, resolved_aux_layers
from ...modeling.heads.losses import IGNORE
from ...modeling.heads.medusa import Repeated
from ..evaluation.drafts import Batch, ExpectedCalls, drafted_probs

_MORE, _ERRORS = 1.25, 3.0  # calls per token, and their standard errors, which tell one form of prompts from the other
_DEFAULTS: dict[str, tuple[str, Any]] = {
    "rope": ("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
    "norms": ("rms_norm_eps", 1e-6),
    "activation": ("hidden_act", "silu"),
}
"""By check, a field and the value of configs that do not say it, which is tried besides the backbone's."""
_PLACES = {-1: "the place before", 1: "the place after"}
_TURNED = ("q_proj", "k_proj", "q_norm", "k_norm")
_CAUSAL = {"full_attention": "causal", "sliding_attention": "sliding_causal"}  # by kind of layer, which rows rows see
_FIELD = "pass it to from_pretrained, or write it in config.json"
_ORDERS = 24  # orders of heads up to which all are tried


@dataclass(frozen=True)
class Drafted:
    """What a drafter does along N texts: expected greedy calls, and two sums over the places of each text.

    `drawn` tells conventions apart where few calls differ.
    """

    calls: ExpectedCalls
    drawn: Tensor  # [N], accepted drafts if tokens were drawn: products over drafts of the sum over tokens of min(p, q)
    surer: Tensor  # [N], by how much first drafts are surer than right

    @property
    def length(self) -> int:
        """Tokens of the drafts."""
        return self.calls.accepted.shape[-1]

    def __add__(self, other: Drafted) -> Drafted:
        drawn, surer = torch.cat([self.drawn, other.drawn]), torch.cat([self.surer, other.surer])
        return Drafted(self.calls + other.calls, drawn, surer)


def answered(prompts: Mapping[str, Tensor], new: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return prompts, padded on the left, and their answers as a batch that scores the answers, padded on the right."""
    rows = [ids[mask.bool()] for ids, mask in zip(prompts["input_ids"], prompts["attention_mask"])]
    texts = [torch.cat([row, row.new_tensor(ids)]) for row, ids in zip(rows, new)]
    labels = [torch.cat([torch.full_like(row, IGNORE), text[len(row) :]]) for row, text in zip(rows, texts)]
    ids, mask = pad_sequence(texts, True), pad_sequence([*map(torch.ones_like, texts)], True)
    return {"input_ids": ids, "labels": pad_sequence(labels, True, IGNORE), "attention_mask": mask}


def along(drafter: Any, texts: Sequence[Batch], length: int, shift: int = 0) -> Drafted:
    """Return what a drafter does along texts (`answered`), draft j compared with the backbone's choice j + `shift`."""
    longest = drafter.longest_draft() or length + abs(shift)
    length = max(min(length, longest - abs(shift)), 1)
    return reduce(add, (_drafted(*_agreement(drafter, batch, length, shift)) for batch in texts))


def reach(drafter: Any, texts: Sequence[Batch], length: int) -> list[float]:
    """Return the shares of verifications that would accept 1 .. m drafts, if each were made as the first one is."""
    found = []
    for batch in texts:
        agrees, *rest = _agreement(drafter, batch, 1, 0)  # [B, L, 1]
        ahead = [nn.functional.pad(agrees[..., 0], (0, by))[:, by:] for by in range(length)]
        found.append(_drafted(torch.stack(ahead, -1), *rest))
    return reduce(add, found).calls.by_position


@torch.no_grad()
def _agreement(drafter: Any, batch: Batch, length: int, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which drafts are right, [B, L, m], terms of `Drafted`, [B, L, 2], and where drafts follow, [B, L]."""
    positions = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    agrees = torch.zeros(*positions.shape, length, dtype=torch.float64)
    terms = torch.zeros(*positions.shape, 2, dtype=torch.float64)
    for probs in drafted_probs(drafter, batch, length + abs(shift)):
        draft = probs.draft[:, max(-shift, 0) :][:, :length]  # [N, m, V]
        target = probs.target[:, max(shift, 0) :][:, :length]
        at = probs.rows.cpu(), probs.columns.cpu()
        right, q = (draft.argmax(-1) == target.argmax(-1)).double(), draft.exp()  # [N, m], [N, m, V]
        drawn = q.minimum(target.softmax(-1)).sum(-1).cumprod(-1).sum(-1)  # [N]
        positions[at], agrees[at] = True, right.cpu()
        terms[at] = torch.stack([drawn, q[:, 0].amax(-1) - right[:, 0]], -1).double().cpu()
    return agrees, terms, positions


def _drafted(agrees: Tensor, terms: Tensor, positions: Tensor) -> Drafted:
    return Drafted(ExpectedCalls.along(agrees.cumprod(-1), positions), *terms.sum(1)[positions.any(1)].unbind(-1))


@contextmanager
def remembered(model: PreTrainedModel) -> Iterator[None]:
    """Run a model once for every batch, with the states of all layers, for all trials along the same texts."""
    forward, known = model.forward, dict[bytes, Any]()

    def recalled(input_ids: Tensor, **options: Any) -> Any:
        key = input_ids.cpu().numpy().tobytes()
        if key not in known:
            known[key] = forward(input_ids, **options | {"output_hidden_states": True})
        return known[key]

    with replaced([become(model, "forward", recalled)]):
        yield


def is_surer(other: Drafted, base: Drafted, errors: float) -> bool:
    """Return whether a convention accepts more drafts, or saves calls, by so many standard errors over texts."""
    gain = other.drawn - base.drawn  # [N]
    found = base.calls.calls - other.calls.calls, gain
    bounds = (len(each) ** 0.5 * errors * float(each.std(correction=len(each) > 1)) for each in found)
    return float(gain.sum()) > 0 and any(float(each.sum()) > bound for each, bound in zip(found, bounds))


def brings_back(other: Drafted, base: Drafted) -> float:
    """Return the share of the lost calls, those beyond the calls of drafts that are always right, that are saved."""
    lost = float(base.calls.calls.sum() - base.calls.tokens.sum() / (1 + base.length))
    return float(base.calls.calls.sum() - other.calls.calls.sum()) / lost if lost > 0 else 0.0


def is_easier(other: Drafted, base: Drafted) -> bool:
    """Return whether other texts take fewer calls per token, more than chance among their tokens would."""
    tokens = [float(each.calls.tokens.sum()) for each in (base, other)]
    rates = [float(each.calls.calls.sum()) / count for each, count in zip((base, other), tokens)]
    error = sum(rate * (1 - rate) / count for rate, count in zip(rates, tokens)) ** 0.5
    return rates[0] > _MORE * rates[1] and rates[0] - rates[1] > _ERRORS * error


Change = tuple[object, str, Callable[[Any], object]]
"""An object, the name of an attribute, and a function from its value to the one that holds in a trial."""


@dataclass(frozen=True)
class Trial:
    """A convention to try, as data: what is changed while it holds, and what a user does if it is the better one."""

    check: str  # the cause that it undoes, if it is the better one; two causes that one trial undoes have a comma
    words: str  # what then fits
    changes: Sequence[Change] = ()
    advice: str = "convert or export the drafter again, in the convention of its layout"
    shift: int = 0
    shows_answer: bool = False  # rows read what follows the next token: only a head that reads it off has learned so
    is_theirs: bool = False  # the backbone's config says it, and the drafter's another value

    @property
    def cause(self) -> str:
        """What trials of one cause have in common."""
        return self.check.partition(",")[0]

    @classmethod
    def of(cls, check: str, owner: object, **values: object) -> Trial:
        """Return the trial of other values of fields."""
        words = ", ".join(f"{name}={value}" for name, value in values.items())
        return cls(check, words, [become(owner, name, value) for name, value in values.items()], _FIELD)

    def holds(self) -> AbstractContextManager[None]:
        """Return a context in which it holds."""
        return replaced(self.changes)


def trials_of(drafter: Any) -> Iterator[Trial]:
    """Yield the trials that a drafter allows."""
    for by in (1,) if isinstance(drafter, BlockDrafter) else (-1, 1):  # rows that draft tokens of before are `row`
        yield Trial("token shift", f"drafts of {by:+d} places", shift=by)
    own = {EagleHead: _of_eagle, BlockDrafter: _of_block, MTPHeads: _of_heads}
    for kind, trials in own.items():
        if isinstance(drafter, kind):
            for each in (trials, _fields, _draft_ids):
                yield from each(drafter)


@contextmanager
def replaced(changes: Sequence[Change]) -> Iterator[None]:
    """Change attributes, and put back what was there; those of a module hide its parameters and modules."""
    made = [(vars(owner), name, change(getattr(owner, name))) for owner, name, change in changes]
    known = [(held, name, held[name]) for held, name, _ in made if name in held]
    for held, name, value in made:
        held[name] = value
    try:
        yield
    finally:
        for held, name, _ in made:
            del held[name]
        for held, name, value in known:
            held[name] = value


def become(owner: object, name: str, value: object) -> Change:
    """Return the change of an attribute to a value."""
    return owner, name, lambda _: value


def ordered(owner: object, name: str, order: Sequence[int], axis: int = 0, within: bool = False) -> Change:
    """Return another order of the equal blocks of a tensor's rows (or columns), or of the rows `within` each block."""

    def change(tensor: Tensor) -> Tensor:
        rows = torch.arange(tensor.shape[axis], device=tensor.device)
        rows = rows.view(-1, len(order))[:, order] if within else rows.view(len(order), -1)[order]
        return tensor.detach().index_select(axis, rows.flatten())

    return owner, name, change


def exchanged(*maps: nn.Module) -> list[Change]:
    """Let maps read the halves of their inputs in the other order."""
    return [ordered(each, "weight", [1, 0], axis=1) for each in maps]


def shifted_rows(head: EagleHead, features: int = 0, tokens: int = 0, positions: int = 0) -> list[Change]:
    """Let rows of a head read features and tokens so many places on, and add to the positions of drafted rows alone."""

    def change(rows: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def changed(
            states: Tensor, next_ids: Tensor, places: Tensor | None = None, mask: Any = None, cache: Cache | None = None
        ) -> Tensor:
            if places is not None and cache is not None and cache.get_seq_length() > 0:
                places = places + positions
            return rows(states, next_ids.roll(-tokens, 1), places, mask, cache)

        return changed

    return [(head, "rows", change), rolled(head, "fuse", features)]


def rolled(drafter: object, name: str, by: int) -> Change:
    """Let a method return the states [B, T, d] of other places."""
    return drafter, name, lambda made: lambda *args, **kwargs: made(*args, **kwargs).roll(-by, 1)


def _features(drafter: object, name: str) -> Iterator[Trial]:
    for by, place in _PLACES.items():
        yield Trial("feature shift", f"features of {place}", [rolled(drafter, name, by)], shows_answer=by > 0)


def _of_eagle(head: EagleHead) -> Iterator[Trial]:
    yield from _features(head, "fuse")
    yield from _pairs(head)
    for by, place in _PLACES.items():
        yield Trial("token shift", f"tokens of {place}", shifted_rows(head, tokens=by), shows_answer=by > 0)
        if head.config.mask_token_id is None:
            where = f"positions of drafted rows {'one less' if by < 0 else 'one more'}"
            yield Trial("positions", where, shifted_rows(head, positions=by))
    if head.config.version == 1:
        yield Trial("fc", "fc with its halves exchanged", exchanged(head.fc))
        return
    attention = untyped(head.layers[0]).self_attn
    maps = attention.q_proj, attention.k_proj, attention.v_proj
    yield Trial("first layer", "q_proj, k_proj and v_proj with their halves exchanged", exchanged(*maps))
    for name, owner in (("norm_output", head.config), ("norm_before_residual", head.layers[0])):
        yield Trial.of("norms", owner, **{name: not getattr(head.config, name)})
    if head.config.num_aux:
        count = head.backbone.config.get_text_config().num_hidden_layers
        now = resolved_aux_layers(head.config, count)
        yield from _layers(head.config, "aux_layers", now, count, [default_aux_layers(count)])


def _pairs(drafter: EagleHead | BlockDrafter) -> Iterator[Trial]:
    """Yield trials in which rope turns other pairs of queries and keys than those of both halves."""
    turned = [module for name, module in drafter.named_modules() if name.endswith(_TURNED)]
    size = untyped(drafter.layers[0]).self_attn.head_dim
    apart = [*range(0, size, 2), *range(1, size, 2)]  # neighbours come to stand where halves do
    back = sorted(range(size), key=apart.__getitem__)
    for words, order in {"rope of neighbours (rope_is_neox_style=False)": apart, "rope of halves twice": back}.items():
        held = [(module, name) for module in turned for name, _ in module.named_parameters(recurse=False)]
        yield Trial("rope", words, [ordered(*each, order, within=True) for each in held])


def _layers(config: Any, name: str, now: list[int], last: int, more: Sequence[list[int]] = ()) -> Iterator[Trial]:
    """Yield other hidden states than a drafter reads, and these in another order, which the blocks of `fc` may have."""
    found = [*more, *([index + by for index in now] for by in (-1, 1))]
    found += [[*now[:i], now[i] + by, *now[i + 1 :]] for i in range(len(now)) for by in (-1, 1)]
    for layers in dict.fromkeys(map(tuple, [*found, *_orders(now)])):
        if list(layers) != now and len({*layers}) == len(now) and all(0 <= index <= last for index in layers):
            yield Trial.of("layer ids" + ", or fc" * (sorted(layers) == now), config, **{name: list(layers)})


def _of_heads(heads: MTPHeads) -> Iterator[Trial]:
    yield from _features(heads, "features")
    if "state_offset" in heads.family.facts.options and not heads.config.draft_layers:
        for value in {heads.config.state_offset + by for by in (-1, 1)} - {-1}:
            yield Trial.of("layer ids", heads.config, state_offset=value)
    for count in (heads.config.num_depths, heads.config.num_drafts):
        if owners := [*_in_order(heads.head, count)]:
            for order in _orders([*range(count)]):
                words = f"heads in the order {[index + 1 for index in order]}"
                yield Trial("depth", words, [_of_depths(*each, order) for each in owners])


def _in_order(head: nn.Module, count: int) -> Iterator[tuple[nn.Module, str]]:
    """Yield what a head has one of for each of `count` depths: modules of a list, or rows of a tensor."""
    for name, module in head.named_modules():
        parts = [*module.children()] if isinstance(module, nn.ModuleList) and not isinstance(module, Repeated) else []
        if len(parts) == count > 1 and len({tuple(each.shape for each in part.parameters()) for part in parts}) == 1:
            yield module, "_modules"
        of_depths = name in ("", "leaf", "state_leaves", "unembeddings")
        for own in ("weight", "maps", "bias", "mix") if of_depths else ():
            rows = getattr(module, own, None)
            is_shared = name == "state_leaves" and own == "weight"
            if isinstance(rows, Tensor) and not is_shared and len(rows) % count == 0:
                yield module, own


def _orders(now: list[int]) -> list[list[int]]:
    """Return other orders: all of few, else reversed, shifted, and with two exchanged."""
    if factorial(len(now)) <= _ORDERS:
        return [*map(list, permutations(now))][1:]
    exchanged = [[{i: j, j: i}.get(index, index) for index in now] for i, j in combinations(now, 2)]
    return [now[::-1], now[1:] + now[:1], now[-1:] + now[:-1], *exchanged]


def _of_depths(owner: nn.Module, name: str, order: list[int]) -> Change:
    if name != "_modules":
        return ordered(owner, name, order)
    return owner, name, lambda held: dict(zip(held, [[*held.values()][index] for index in order]))


def _of_block(drafter: BlockDrafter) -> Iterator[Trial]:
    config, total = drafter.config, drafter.backbone.config.get_text_config().num_hidden_layers
    yield from _features(drafter, "fuse")
    yield from _pairs(drafter)
    usual = [index + 1 for index in default_ids(total, config.num_hidden_layers)], default_aux_layers(total)
    yield from _layers(config, "feature_layers", drafter.feature_layers, total - 1, usual)
    for values in _rows(config):
        yield Trial.of("row", config, **values)
    if (window := config.sliding_window) is not None:  # without one, a window may help a sound drafter with long texts
        causal = config.causal if "full_attention" in (config.layer_types or ()) else config.sliding_causal
        whole = {"layer_types": ["full_attention"] * config.num_hidden_layers, "causal": causal}
        for values in (whole, {"sliding_window": window + 1}, {"sliding_window": window - 1 or 2}):
            yield Trial.of("window of rows", config, **values)
    for module in drafter.modules():
        yield from _of_law(module)


def _rows(config: BlockDrafterConfig) -> Iterator[Kwargs]:
    """Yield other rows that draft, other sizes of a block, and other rows that each row sees."""
    size, first = config.block_size, not config.sample_from_anchor
    yield {"sample_from_anchor": first}
    if config.conv_kernel_size is None:  # convolutions know the size
        yield from ({"block_size": other} for other in (size + 1, 2 * size))
        yield from [{"sample_from_anchor": True, "block_size": size - 1}] * first  # as many drafts
    flags = [name for kind, name in _CAUSAL.items() if kind in (config.layer_types or ())]
    for names in dict.fromkeys([*zip(flags), tuple(flags)]):
        yield {name: not getattr(config, name) for name in names}


def _of_law(law: nn.Module) -> Iterator[Trial]:
    """Yield trials of a law's tables in each other's place, and of its maps with their parts in another order."""
    pair = list[tuple[nn.Module, str]]()
    if isinstance(law, SelectorLaw):
        pair = [(law, "predecessor_codebook"), (law, "successor_codebook")]
    elif isinstance(law, MarkovLaw):
        pair = [(law.markov_w1, "weight"), (law.markov_w2, "weight")]
        if (gate := law.gate_proj) is not None:
            columns = [*range(law.width, gate.in_features), *range(law.width)]
            yield Trial("law", "gate_proj that reads tokens before rows", [ordered(gate, "weight", columns, axis=1)])
        if (joint := law.joint_proj) is not None:
            for order in _orders([0, 1, 2]):
                changes = [ordered(joint, name, order) for name in ("weight", "bias")]
                yield Trial("law", f"gate, state and output of joint_proj in the order {order}", changes)
    tables = [getattr(owner, name) for owner, name in pair]
    if pair and tables[0].shape == tables[1].shape:
        changes = [become(*each, table) for each, table in zip(pair, reversed(tables))]
        yield Trial("law", "its two tables of tokens exchanged", changes)


def _fields(drafter: EagleHead | BlockDrafter | MTPHeads) -> Iterator[Trial]:
    """Yield values of the backbone's config, and those of none, for fields that shape a drafter's layers."""
    text = drafter.backbone.config.get_text_config()
    theirs = layer_fields(text, {}) | {"hidden_act": field(text, "hidden_act", "hidden_activation")}
    for check, (name, usual) in _DEFAULTS.items():
        for value in [theirs[name]] + [usual] * (theirs[name] != usual):
            if value is not None and (changes := _changed(drafter, name, value)):
                yield Trial(check, f"{name}={value}", changes, _FIELD, is_theirs=value == theirs[name])
    size = theirs["head_dim"]
    if isinstance(drafter, EagleHead) and not drafter.config.qk_norm and size % 2 == 0:
        attention = [untyped(layer).self_attn for layer in drafter.layers]
        if all(each.head_dim != size and each.k_proj.out_features % size == 0 for each in attention):
            turned = [become(each, "forward", _turned(each, head_dim=size)) for each in _parts(drafter, "inv_freq")]
            values = {"head_dim": size, "scaling": size**-0.5}
            changes = [become(each, *value) for each in attention for value in values.items()] + turned
            yield Trial("head_dim", f"head_dim={size}", changes, _FIELD, is_theirs=True)


def _parts(drafter: nn.Module, name: str) -> list[Any]:
    return [each for each in drafter.modules() if hasattr(each, name)]


def _changed(drafter: EagleHead | BlockDrafter | MTPHeads, name: str, value: Any) -> list[Change]:
    """Return what to change in a drafter for the value of a field; nothing where it has that value."""
    if name == "rope_parameters":
        parts = [each for each in _parts(drafter, "inv_freq") if field(each.config, name) != value]
        return [become(each, "forward", _turned(each, rope_parameters=dict(value))) for each in parts]
    if name == "hidden_act":
        parts = [each for each in _parts(drafter, "act_fn") if type(each.act_fn) is not type(ACT2FN[value])]
        return [become(each, "act_fn", ACT2FN[value]) for each in parts]
    norms = _parts(drafter, "variance_epsilon")
    odd = [each for each in norms if not isclose(each.variance_epsilon, value, rel_tol=1e-3)]
    return odd and [*(become(each, "variance_epsilon", value) for each in odd), become(drafter.config, name, value)]


def _turned(module: Any, **fields: Any) -> Callable[..., Any]:
    """Return how a rotary embedding turns whose config has other fields."""
    config = copy(module.config)
    vars(config).update(fields)
    return type(module)(config).to(module.inv_freq.device).forward


def _draft_ids(drafter: Any) -> Iterator[Trial]:
    """Yield other ids of a draft vocabulary: one off, ids in place of offsets, those whose rows the unembedding has."""
    if drafter.offsets is None:
        return
    ids, size, count = drafter.draft_ids, drafter.config.vocab_size, torch.arange(drafter.draft_size)
    tried = {"draft ids one less": ids - 1, "draft ids one more": ids + 1, "d2t as token ids": drafter.offsets}
    tried["d2t as offsets of token ids, which it repeats"] = ids + count.to(ids)
    for words, other in tried.items():
        is_known = bool((other[1:] > other[:-1]).all()) and int(other[0]) >= 0 and int(other[-1]) < size
        if is_known and not other.equal(ids):
            buffers = {**drafter._buffers, "d2t": other - count.to(other)}
            yield Trial("d2t", words, [become(drafter, "_buffers", buffers), become(drafter, "_part", None)])
