"""Per-call speculative decoding options, parsed and validated once, and their form for draft sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..backbone.target import traits_of
from ..backbone.wrapped_models import Kwargs
from ..contract import DraftTree
from ..tensors.sampling import draw
from .constraints import DraftMasks
from .costs import BlockCosts
from .processing import Processing
from .sequences import Sequences

SCHEDULES = ("constant", "heuristic", "heuristic_transient", "adaptive", "expected")
"""Values of `num_assistant_tokens_schedule`; all but the last two draft a constant number here."""
GENERATE_KWARGS = (
    "verification", "draft_tree", "uniforms", "seed", "slot_budget", "draft_vocabulary", "scope",
)  # fmt: skip
"""Keyword arguments of `generate` that transformers does not know; a GenerationConfig may hold all but tensors."""
_LEAST_WEIGHTS = 10_000_000  # of a language model that anybody waits for
_ANY = 1 << 31  # more tokens than any call has
Sources = tuple[dict[str, Any] | GenerationConfig | None, ...]
"""Keyword arguments and configs, of which the first that sets an option decides."""
LONGEST_PATH = 32
"""More tokens than a path of any usual draft has: drafts of the longest sequences go beyond the end, and slots follow
them. Shorter ones are never cut before a call, so that what schedules learned holds for calls of any length."""
_LARGEST_TREE, _MOST_BRANCHES = 96, 16  # the same for the tokens of a tree, and for the branches of one without a size
_FIXING = "draft_tree", "uniforms", "seed", "slot_budget"  # whoever sets one has chosen what is drafted
_ASSISTED = "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"


@dataclass(frozen=True)
class CallOptions:
    """Options of one call of `generate`; a drafter completes them in `prepare_call`."""

    use_mtp: bool | None = None  # True: or raise an error with the reason; None: where possible
    verification: str | None = None
    num_assistant_tokens: int | None = None
    schedule: str = "constant"
    threshold: float = 0.0  # a chain ends with a token that its own distribution gave less in every sequence; 0: never
    draft_tree: Kwargs | list[tuple[int, ...]] | str | None = None  # options, rank paths, "auto"; None: a chain
    extra: Kwargs = field(default_factory=dict)  # of one kind of drafter only: a seed, a draft vocabulary, tokenizers
    needs_our_loop: bool = False  # even where nothing is drafted: tokens come from the call's uniforms
    speculates: bool = False
    is_asked: bool = False  # somebody has set the schedule

    @property
    def is_ours(self) -> bool:
        """Whether our loop decodes."""
        return self.speculates or self.needs_our_loop

    def cut(self, backbone: PreTrainedModel, prompt: Tensor, max_length: int | None) -> CallOptions:
        """Return the options without drafts that the call cannot use, before anything is allocated for them.

        With a seed, text must not depend on the length limit, so that only the context bounds paths and trees.
        """
        context = getattr(backbone.config.get_text_config(), "max_position_embeddings", None) or _ANY
        left = _ANY if max_length is None or self.needs_our_loop else max_length - prompt.shape[1]
        most = min(left, context)
        number, tree = min(self.num_assistant_tokens or 0, max(most, LONGEST_PATH)), self.draft_tree
        if isinstance(tree, dict):
            size = max(most, _LARGEST_TREE)
            # branches without a size share it
            width = size if "total_tokens" in tree else max(size // max(number, 1), _MOST_BRANCHES)
            bounds = {"depth": max(most, LONGEST_PATH) - 1, "total_tokens": size, "top_k": width}
            tree = {name: min(value, bounds.get(name, value)) for name, value in tree.items()}
        return replace(self, num_assistant_tokens=number, draft_tree=tree)

    @classmethod
    def read(
        cls, own: Kwargs, sources: Sources, left_out: tuple[str, ...] = (), of_assistant: GenerationConfig | None = None
    ) -> CallOptions:
        """Take every option from the first source that sets it, and validate it.

        `own` are passed keyword arguments of `GENERATE_KWARGS`, and those of the names `left_out` are read there alone;
        `of_assistant` is the config of a model that drafts, the last source of how many tokens it drafts.
        """
        use_mtp = first_set("use_mtp", sources)
        number, schedule, threshold = (first_set(name, (*sources, of_assistant)) for name in _ASSISTED)
        is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 1
        is_share = isinstance(threshold, (int, float)) and 0 <= threshold <= 1
        if use_mtp not in (None, True, False):
            raise ValueError(f"use_mtp={use_mtp!r} must be True, False or None")
        if not (number is None or is_number):
            raise ValueError(f"num_assistant_tokens={number!r} must be a whole number of at least 1")
        if schedule not in (None, *SCHEDULES):
            raise ValueError(f"num_assistant_tokens_schedule={schedule!r} must be one of {SCHEDULES}")
        if not (threshold is None or is_share):
            raise ValueError(f"assistant_confidence_threshold={threshold!r} must lie in 0 .. 1")
        values = {name: first_set(name, (own,) if name in left_out else (own, *sources)) for name in GENERATE_KWARGS}
        extra, call = {name: values[name] for name in GENERATE_KWARGS[2:] if values[name] is not None}, sources[:1]
        if (tokenizer := first_set("assistant_tokenizer", call)) is not None:
            extra |= {"assistant_tokenizer": tokenizer, "tokenizer": first_set("tokenizer", call)}
        is_fixed = number or threshold or any(values[name] is not None for name in _FIXING)
        assisted = number, schedule or ("constant" if is_fixed else "expected"), threshold or 0.0
        is_asked = schedule is not None
        return cls(use_mtp, values["verification"], *assisted, values["draft_tree"], extra, is_asked=is_asked)


def first_set(name: str, sources: Sources) -> Any:
    """Return the first value that is set: keyword arguments before the config passed, before the model's own."""
    for source in sources:
        value = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
        if value is not None:
            return value
    return None


class NumberCheck:
    """Numbers that drafts were chosen from: NaN and infinity are noticed without a wait for the device."""

    def __init__(self) -> None:
        self.noted: list[Tensor] = []

    def note(self, values: Tensor) -> None:
        """Add [B, ...]: the largest of each row of logits, or any entry of what softmax made of them: NaN, or none."""
        self.noted.append(values)

    def taken(self, device: torch.device) -> Tensor | None:
        """Return [B], NaN or +inf where anything is that was noted since the last call (-inf are masks); or None."""
        noted, self.noted = [values.reshape(len(values), -1).to(device) for values in self.noted], []
        if not noted:
            return None
        return (noted[0] if len(noted) == 1 else torch.cat(noted, 1)).amax(1)


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftOptions(CallOptions):
    """The options of one call with what transformers prepared, for its draft session and verifier."""

    backbone: PreTrainedModel
    draft_tree: Kwargs | None = None  # complete by now (`growth.tree_options`)
    do_sample: bool
    processors: LogitsProcessorList  # the target's; `processing` applies them
    max_length: int  # tokens of the longest sequence, prompt included
    prompt: Tensor  # [B, L] int64
    pad: int = 0  # id that `generate` writes after a sequence's end
    cache: str | None = None  # the `cache_implementation` of the call
    ends: frozenset[int] = frozenset()  # ids that end a sequence
    numbers: NumberCheck = field(default_factory=NumberCheck)  # what the drafts of a cycle were chosen from

    @classmethod
    def of_call(
        cls,
        options: CallOptions,
        backbone: PreTrainedModel,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        prompt: Tensor,
    ) -> DraftOptions:
        """Return the options of a call together with the arguments that transformers prepared."""
        pad, end = getattr(config, "_pad_token_tensor", None), config.eos_token_id
        return cls(
            **vars(options),
            backbone=backbone,
            do_sample=bool(config.do_sample),
            processors=processors,
            max_length=config.max_length,
            prompt=prompt,
            pad=0 if pad is None else int(pad),
            cache=config.cache_implementation,
            ends=frozenset(end if isinstance(end, (list, tuple)) else () if end is None else (end,)),
        )

    @property
    def num_tokens(self) -> int:
        """The longest path of a draft."""
        return self.num_assistant_tokens or 0

    @cached_property
    def processing(self) -> Processing:
        """The processors, at several positions of ragged sequences; their padding is an id of the vocabulary."""
        pad = self.pad if 0 <= self.pad < self.backbone.config.get_text_config().vocab_size else 0
        return Processing(self.processors, pad, self.ends, self.prompt.shape[1])

    @cached_property
    def block(self) -> BlockCosts | None:
        """What blocks cost, where that decides the lengths of drafts; None: they are as long as they can be."""
        model, weights = self.backbone, traits_of(self.backbone).weights
        if self.schedule != "expected" or self.cache == "static" or not (self.is_asked or weights >= _LEAST_WEIGHTS):
            return None
        return BlockCosts.of(model.dtype, model.device, max(weights, 1), len(self.prompt))

    @property
    def may_exclude_all(self) -> bool:
        """Whether the processors may leave no token."""
        return bool(self.processors) and self.processing.constraints.may_exclude_all

    def masks(self, tokens: Sequences, is_warped: bool | None = None) -> DraftMasks | None:
        """Return the tokens that a draft after every sequence may hold under the call's constraints; None: all.

        `is_warped` drafts are drawn from distributions that `choose` or `grow` made, as by default where calls sample.
        """
        if not self.processors:
            return None
        is_drawn = self.do_sample and not self.has_likely_tree
        return self.processing.constraints.masks(tokens, is_drawn if is_warped is None else is_warped)

    @property
    def has_likely_tree(self) -> bool:
        """Whether trees hold likely tokens in any case, as those of fixed shape do, and no draws."""
        return self.draft_tree is not None and "choices" in self.draft_tree

    def choose(
        self, logits: Tensor, draft_ids: Tensor | None = None, vocab_size: int = 0, masks: DraftMasks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a token [B] of a chain, which extends `masks`, and the distribution [B, V] that it was drawn from.

        It is warped where drawn, raw where greedy with a threshold, else None. Arguments as for `draft_probs`.
        """
        if not (self.do_sample or self.threshold) and (masks is None or draft_ids is None):
            if masks is not None:
                logits = logits.masked_fill(~masks.allowed(logits.shape, logits.device), -torch.inf)
            best = logits.max(-1)
            token = best.indices
            self.numbers.note(best.values)
            if masks is not None:
                masks.extend(token)
            return token if draft_ids is None else draft_ids[token], None
        distribution = draft_probs(logits, self, draft_ids, vocab_size, masks)  # [B, V]
        return chosen(distribution, self, masks, draft_ids), distribution

    def is_unsure(self, token: Tensor, distribution: Tensor | None) -> bool:
        """Return whether all sequences gave their tokens [B] less than the threshold; then a draft ends behind them."""
        return distribution is not None and bool((distribution.gather(-1, token[:, None]) < self.threshold).all())

    def sure_length(self, draft: Tensor, probs: Tensor) -> int:
        """Return how many tokens of whole drafts [B, m], drawn from probs [B, m, V], to verify; the host waits for it.

        The first of which no sequence was sure is the last: a draft ends by its own tokens alone.
        """
        chances = probs.gather(-1, draft[..., None])[..., 0]  # [B, m]
        *unsure, _ = (chances < self.threshold).all(0).tolist()  # by position
        return [*unsure, True].index(True) + 1


def grow_chain(
    step: Callable[[Tensor | None], tuple[Tensor, Tensor | None]], options: DraftOptions, length: int
) -> DraftTree:
    """Return a chain of 1 to `length` tokens; it ends with a token that no sequence is sure of.

    `step` goes from the last drafted token [B] (None at first) to the next one and its distribution [B, V].
    """
    drafts, probs = list[Tensor](), list[Tensor | None]()
    while len(drafts) < length and not (drafts and options.threshold and options.is_unsure(drafts[-1], probs[-1])):
        token, distribution = step(drafts[-1] if drafts else None)
        drafts.append(token)
        probs.append(distribution)
    return chain_of(drafts, probs, options)


def block_chain(
    logits: Tensor,
    options: DraftOptions,
    masks: DraftMasks | None,
    draft_ids: Tensor | None = None,
    vocab_size: int = 0,
) -> DraftTree:
    """Return a chain of tokens from logits [B, m, v] that none of them changes; see `DraftOptions.choose`."""
    # m drafts [B], each with its distribution [B, V] or None
    drafts, probs = zip(*(options.choose(step, draft_ids, vocab_size, masks) for step in logits.unbind(1)))
    length = options.sure_length(torch.stack(drafts, 1), torch.stack(probs, 1)) if options.threshold else len(drafts)
    return chain_of(drafts[:length], probs[:length], options)


def chain_of(drafts: Sequence[Tensor], probs: Sequence[Tensor | None], options: DraftOptions) -> DraftTree:
    """Return a chain of tokens [B], with their distributions where the call samples."""
    known = [each for each in probs if each is not None and options.do_sample]
    # [B, m], and [B, m, V]
    return DraftTree.chain(torch.stack(list(drafts), 1), torch.stack(known, 1) if known else None)


def chosen(
    distribution: Tensor, options: DraftOptions, masks: DraftMasks | None, draft_ids: Tensor | None = None
) -> Tensor:
    """Return a token [B] of a draft's distribution [B, V], drawn where the call samples; it extends `masks`."""
    if not options.do_sample:
        token = distribution.argmax(-1)  # [B]
    elif draft_ids is None or masks is not None:
        token = draw(distribution)  # [B]
    else:
        token = draft_ids[draw(distribution.index_select(-1, draft_ids))]  # [B]
    if masks is not None:
        masks.extend(token)
    return token


def draft_probs(
    logits: Tensor,
    options: DraftOptions,
    draft_ids: Tensor | None = None,
    vocab_size: int = 0,
    masks: DraftMasks | None = None,
) -> Tensor:
    """Return probabilities over the whole vocabulary [..., V] from a drafter's logits [..., v], warped where sampled.

    Args:
        logits: [..., v].
        options: Of the call.
        draft_ids: [v] int64, the token ids of the columns of logits; None: every token, in order.
        vocab_size: V; not read where every token has a column.
        masks: The tokens that may be drafted now.
    """
    probs, is_part = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1), False
    options.numbers.note(probs[..., 0])
    if draft_ids is not None and probs.shape[-1] < vocab_size:
        is_part, probs = True, probs.new_zeros(*probs.shape[:-1], vocab_size).index_copy_(-1, draft_ids, probs)
    return warped(probs, options, is_part, masks) if options.do_sample or masks is not None else probs


def warped(distribution: Tensor, options: DraftOptions, is_part: bool, masks: DraftMasks | None = None) -> Tensor:
    """Return probabilities [..., V] after the call's processors; `is_part`: those of a draft vocabulary alone."""
    allowed = None if masks is None else masks.allowed(distribution.shape, distribution.device)
    if is_part and allowed is not None:  # a token without a column has no successors: an excluded one ends the draft
        allowed = allowed | ~(allowed & (distribution > 0)).any(-1, keepdim=True)  # [..., V]
    probs = options.processing.warp(distribution, allowed)
    if not is_part or masks is not None or not options.processing.pointwise:
        return probs
    # processors may have left none of its tokens: any distribution will do then
    return torch.where(probs.isnan().any(-1, keepdim=True), distribution, probs)
