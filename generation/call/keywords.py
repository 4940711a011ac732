"""Keyword arguments of the backbone in every forward of a call, besides ids, cache, mask and positions.

transformers' own loop calls the model's `prepare_inputs_for_generation` before every forward, and its
`_update_model_kwargs_for_generation` after it. Those of transformers return the same values after every prompt: they
are called once. Those of a user's class may compute values from the tokens and their columns: they are called for every
column of a block, as transformers' loop would call them there, and their results are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import ismethod
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.generation import utils
from transformers.utils.generic import ModelOutput

from ...configuration.cache_names import CACHE, NAMES
from ..tensors.wrapped_models import Kwargs, is_base
from .sequences import Sequences

_TYPES = {"token_type_ids", "mm_token_type_ids"}
"""Kinds of tokens: `target.target.Continuation` continues them as transformers' own updates do."""
_OURS = {
    "input_ids", "attention_mask", "position_ids", *NAMES, "cache_position", "use_cache", "logits_to_keep",
    "labels", "return_dict", "output_attentions", "output_hidden_states", "inputs_embeds", "next_sequence_length",
    "is_first_iteration",
}  # fmt: skip
"""Keyword arguments that the loop and its target pass themselves."""
_READ_ONCE = set(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))
"""Those that are read with the prompt alone: images and sound."""
_OF_AN_ENCODER = {"encoder_hidden_states", "encoder_attention_mask"}
"""Those with columns of another sequence, which may be as long as the prompt."""
USUAL = _OURS | _TYPES | _READ_ONCE
"""Those that forwards after the prompt do not need from here."""
_UNREADABLE = (AttributeError, LookupError, TypeError)
"""Errors of a model's methods that read more than they get here."""
_PACKAGE = __name__.rpartition(".generation.")[0]
Columns = list[Kwargs]
"""The keyword arguments of single tokens in successive columns."""


class NotHandedOn(ValueError):
    """A keyword argument `name` that a block of tokens cannot get."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name} differs between sequences or tokens of one forward: decode with use_mtp=False")


class _AtLength(Cache):
    """A cache that knows only how many tokens are in it."""

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length."""
        return self.length


class Keywords:
    """The keyword arguments of one call, after its prompt.

    Args:
        model: The backbone.
        model_kwargs: Prepared keyword arguments of the prefill.
        prompt: [B, L] int64.
        draws_trees: Whether drafts branch: values that differ between columns are an obstacle then.

    Attributes:
        position_ids: Of the prompt, counted as the model counts after it; None where the call has none.
        constant: The keyword arguments of every forward; filled where the model's methods are called once.
        is_prepared: Whether the model's methods are called for every column.
        reason: An obstacle to blocks, in the user's words; None: there is none.
    """

    def __init__(self, model: PreTrainedModel, model_kwargs: Kwargs, prompt: Tensor, draws_trees: bool = False) -> None:
        self.kind, self.draws_trees, self.constant = type(model).__name__, draws_trees, Kwargs()
        self.position_ids = model_kwargs.get("position_ids")
        self.reason: str | None = None
        self.prepare = cast(Callable[..., Kwargs], model.prepare_inputs_for_generation)
        self.update = cast(Callable[..., Kwargs], model._update_model_kwargs_for_generation)
        owner = self.prepare.__self__ if ismethod(self.prepare) else model
        if owner is not model:  # peft's virtual tokens, which are in the cache and have no ids
            self.reason, self.is_prepared = f"inputs that {type(owner).__name__} prepares", False
            return
        self.is_prepared = not (is_base(self.update) and _is_known(self.prepare))
        self.by_length = {prompt.shape[1]: model_kwargs}
        with_columns = [model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"), prompt]
        self.cached_before = next(each.shape[-1] for each in with_columns if each is not None) - prompt.shape[1]
        try:
            self._begin(prompt)
        except NotHandedOn as error:
            self.reason = error.name

    def _begin(self, prompt: Tensor) -> None:
        """Call the model's methods once, or for two columns where they are called for every one."""
        length, more = prompt.shape[1], torch.arange(2, device=prompt.device).expand(len(prompt), -1)
        ids = torch.cat([prompt, more], dim=1)  # [B, L + 2]
        inputs, kwargs = self._inputs(ids[:, : length + 1]), self._kwargs_at(length + 1)
        if self.is_prepared and not _is_same(inputs.get("attention_mask"), kwargs.get("attention_mask")):
            raise NotHandedOn("attention_mask=")
        counted, positions = inputs.get("position_ids"), kwargs.get("position_ids")
        if self.position_ids is not None and positions is not None:
            if counted is None:
                raise NotHandedOn("position_ids=")
            # some models count from 1
            self.position_ids = self.position_ids + (counted[..., -1:].to(positions.device) - positions[..., -1:])
        columns = [self._at(ids[:, : length + 1 + step]) for step in range(1 + self.is_prepared)]
        for name, value in columns[0].items():
            whole = value if self.is_prepared else self.by_length[length].get(name, value)
            if name not in _OF_AN_ENCODER and _has_columns(whole, prompt):
                raise NotHandedOn(f"{name}=")
        made = _merged(columns, None if self.draws_trees else torch.zeros_like(prompt[:, :1]), 1)
        self.constant = {} if self.is_prepared else made

    @property
    def are_plain(self) -> bool:
        """Whether every forward gets the same numbers and texts, and no tensor."""
        values = self.constant.values()
        return not self.is_prepared and all(isinstance(value, (bool, int, float, str, type(None))) for value in values)

    def of_block(self, tokens: Sequences, drafts: Tensor, depth: int, done: list[bool]) -> Kwargs:
        """Return the keyword arguments of a block: the last token of every sequence and its drafts [B, m], `depth`
        deep.

        Those of sequences that are `done` are arbitrary.

        Raises:
            NotHandedOn: One differs between sequences or tokens, and has no column for each of them.
        """
        if not self.is_prepared:
            return self.constant
        open_lengths = [n for n, ended in zip(tokens.lengths, done) if not ended] or tokens.lengths
        starts = [n if n in open_lengths else open_lengths[0] for n in tokens.lengths]
        lengths = sorted({start + step for start in starts for step in range(depth + 1)})
        # those of sequences that have ended are read once more, at the end of the call
        kept = (n for n in self.by_length if n >= lengths[0] - 1 or n in tokens.lengths)
        self.by_length = {n: self.by_length[n] for n in kept}
        tokens.write(drafts)  # without counting them
        written = [drafts.shape[1]] * len(starts)
        columns = [self._at(tokens.prefix(length, written)) for length in lengths]
        take = [[lengths.index(start + step) for step in range(depth + 1)] for start in starts]
        columns_of = None if self.draws_trees else torch.tensor(take, device=drafts.device)
        return _merged(columns, columns_of, 1 + drafts.shape[1])

    def longest(self, tokens: Sequences, length: int, done: list[bool]) -> int:
        """Return how many tokens to draft of `length`: none across a change that no block can represent.

        It does not depend on the drafts: whether one is verified must not depend on its tokens.
        """
        if self.is_prepared and length:
            try:
                self.of_block(tokens, tokens.last()[:, None].expand(-1, length), length, done)
            except NotHandedOn:
                return 0
        return length

    def _at(self, ids: Tensor) -> Kwargs:
        """Return the keyword arguments for the last token of sequences [B, n] that the loop does not pass itself."""
        ours = _OURS if self.is_prepared else _OURS | _TYPES
        return {name: value for name, value in self._inputs(ids).items() if value is not None and name not in ours}

    def _inputs(self, ids: Tensor) -> Kwargs:
        """Return the inputs of the last token of sequences [B, n], as transformers' loop prepares them."""
        cache = _AtLength(self.cached_before + ids.shape[1] - 1)
        kwargs = self._kwargs_at(ids.shape[1]) | {CACHE: cache, "use_cache": True}
        try:
            inputs = self.prepare(ids, next_sequence_length=1, **kwargs)
        except _UNREADABLE as error:  # it reads more of the cache than its length
            raise NotHandedOn(f"what {self.kind}.prepare_inputs_for_generation reads") from error
        if inputs.get("inputs_embeds") is not None:
            raise NotHandedOn("inputs_embeds=")
        return inputs

    def _kwargs_at(self, length: int) -> Kwargs:
        """Return the keyword arguments when sequences have `length` columns."""
        for columns in range(max(self.by_length) + 1, length + 1):
            before, outputs = dict(self.by_length[columns - 1]), ModelOutput()
            try:
                self.by_length[columns] = self.update(outputs, before, is_encoder_decoder=False)
            except _UNREADABLE as error:  # it reads outputs of the last forward
                raise NotHandedOn(f"what {self.kind}._update_model_kwargs_for_generation reads") from error
        return self.by_length[length]


def _is_known(method: Callable[..., object]) -> bool:
    """Return whether a method is one of transformers or of this library."""
    return method.__module__.startswith(("transformers.", f"{_PACKAGE}."))


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two masks are equal."""
    if one is None or other is None or one.shape != other.shape:
        return one is other
    return torch.equal(one, other.to(one))


def _has_columns(value: object, prompt: Tensor) -> bool:
    """Return whether a value has a column for every token of a prompt [B, L], which nobody slices."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[0] not in (1, len(prompt)):
        return False
    columns, length = value.shape[1], prompt.shape[1]
    return columns > 1 and (columns == length or (value.dim() > 2 and len(prompt) > 1 and columns > length))


def _merged(columns: Columns, take: Tensor | None, count: int) -> Kwargs:
    """Return the keyword arguments of a block of `count` tokens, `take` [B, count] being the column of each.

    Without `take` all columns must agree.

    Raises:
        NotHandedOn: A value differs between columns and has no dimension of columns.
    """
    names = {name: None for column in columns for name in column}
    return {name: _joined(name, [column.get(name) for column in columns], take, count) for name in names}


def _joined(name: str, values: list[Any], take: Tensor | None, count: int) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    if not all(isinstance(value, Tensor) for value in values):
        if any(isinstance(value, Tensor) or value != first for value in values):
            raise NotHandedOn(f"{name}=")
        return first
    is_column = first.dim() > 1 and all(value.shape == first.shape for value in values) and first.shape[1] == 1
    if is_column and take is not None:
        whole = torch.cat(values, dim=1)  # [1 or B, n, ...]
        whole = whole.expand(len(take), *whole.shape[1:])  # [B, n, ...]
        return whole[torch.arange(len(take), device=whole.device)[:, None], take.to(whole.device)]  # [B, count, ...]
    if not all(torch.equal(value, first) for value in values):
        raise NotHandedOn(f"{name}=")
    return first.expand(-1, count, *first.shape[2:]) if is_column else first
