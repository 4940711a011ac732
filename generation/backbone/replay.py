"""Recurrent layers after rejected drafts: exact rollback by replay.

The state of a recurrent layer is s_t = F(s_{t-1}, x_t), with x_t its mixer's input at token t, and cannot be cropped.
So the states before a block are cloned, every mixer's inputs of the block are remembered and, where a row keeps only
the first c tokens, its states are restored and F is applied to x_1 .. x_c again: the mixers run alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...configuration.cache_names import name_of_cache
from .wrapped_models import Kwargs

_STATES = ("conv_states", "recurrent_states")
_INPUTS = ("hidden_states", "input_ids")
_OF_THREAD = threading.local()  # no ContextVar: torch.compile cannot read one


class Replay:
    """The recurrent layers of a cache, and the mixers of a backbone without its head that read and write them."""

    def __init__(self, decoder: nn.Module, cache: Cache) -> None:
        self.cache = cache
        self.mixers = find_mixers(decoder, cache)
        self.before: dict[int, dict[str, dict[int, Tensor]]] = {}
        self.inputs: dict[nn.Module, dict[str, Tensor]] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Remembers what `keep` needs of the one backbone call that is made inside, and in this thread."""
        self.before = {index: _copies(self.cache.layers[index]) for index in self.mixers}
        _OF_THREAD.recording = self
        with ExitStack() as hooks:
            hooks.callback(setattr, _OF_THREAD, "recording", None)
            for mixer in (mixer for mixers in self.mixers.values() for mixer in mixers):
                hooks.enter_context(mixer.register_forward_pre_hook(self._remember, with_kwargs=True))
            yield

    def _remember(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: Kwargs | None = None) -> None:
        # a hook that its thread removes while another one is about to call it gets no keyword arguments any more
        if kwargs is None or getattr(_OF_THREAD, "recording", None) is not self:
            return
        given = dict(zip(inspect.signature(mixer.forward).parameters, args)) | kwargs
        self.inputs[mixer] = {name: given[name] for name in _INPUTS if isinstance(given.get(name), Tensor)}

    @torch.no_grad()
    def keep(self, counts: list[int]) -> None:
        """Leaves every sequence's states after the first `counts[b]` tokens of the recorded block."""
        fed = next((inputs["hidden_states"].shape[1] for inputs in self.inputs.values()), 0)
        for count in sorted(set(counts) - {fed}):
            rows = [row for row, kept in enumerate(counts) if kept == count]
            for index, mixers in self.mixers.items():
                self._replay(index, mixers, rows, count)
        self.before, self.inputs = {}, {}

    def _replay(self, index: int, mixers: list[nn.Module], rows: list[int], count: int) -> None:
        layer = cast(LinearAttentionCacheLayerMixin, self.cache.layers[index])
        batch = len(self.inputs[mixers[0]]["hidden_states"])
        # hooks may know the place of each sequence in the batch: peft's adapters of single sequences
        is_hooked = any(module._forward_pre_hooks for mixer in mixers for module in mixer.modules())
        fed = list(range(batch)) if is_hooked else rows
        view = copy.copy(layer)
        for name, states in self.before[index].items():
            setattr(view, name, getattr(layer, name) | {i: state[fed] for i, state in states.items()})
        view.has_previous_state = dict(layer.has_previous_state)
        for mixer in mixers if count else ():
            inputs = {
                name: given[torch.tensor(fed, device=given.device), :count]  # [b, count, ...]
                for name, given in self.inputs[mixer].items()
            }
            mixer(**inputs, **{str(name_of_cache(mixer.forward)): _Only(index, view)})
        for name, states in self.before[index].items():
            for i in states:
                getattr(layer, name)[i][rows] = getattr(view, name)[i][[fed.index(row) for row in rows]]


class _Only(Cache):
    """A cache with one layer, which keeps its number."""

    def __init__(self, index: int, layer: LinearAttentionCacheLayerMixin) -> None:
        super().__init__(layers=[layer for _ in range(index + 1)])


def find_mixers(decoder: nn.Module, cache: Cache) -> dict[int, list[nn.Module]]:
    """The modules of a decoder that read and write the recurrent states of a cache, by layer.

    The innermost module whose own code updates states is the mixer. A further one also reads the token ids.
    """
    found: dict[int, nn.Module] = {}
    further: dict[int, list[nn.Module]] = {}
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(cache.layers) or name_of_cache(module.forward) is None:
            continue
        if not isinstance(cache.layers[index], LinearAttentionCacheLayerMixin):
            continue
        if set(_INPUTS) <= set(inspect.signature(module.forward).parameters):
            further.setdefault(index, []).append(module)
        elif index not in found or _rank(type(module)) >= _rank(type(found[index])):
            found[index] = module
    return {index: [mixer, *further.get(index, ())] for index, mixer in found.items()}


@functools.cache
def _rank(kind: type[nn.Module]) -> int:
    """Return which states the code of a class updates: 2 recurrent ones, 1 of a convolution, 0 none."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return 0
    return 2 if "update_recurrent_state" in source else int("update_conv_state" in source)


def _copies(layer: object) -> dict[str, dict[int, Tensor]]:
    """Clones of a layer's states; they are updated in place."""
    return {
        name: {i: state.clone() for i, state in getattr(layer, name).items() if state is not None} for name in _STATES
    }
