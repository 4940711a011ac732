"""Recurrent layers after rejected drafts: exact rollback by replay.

The state of a recurrent layer is s_t = F(s_{t-1}, x_t), with x_t its mixer's input at token t, and cannot be cropped.
By causality x_t depends on tokens up to t alone. So the states before a block are cloned, every mixer's inputs of the
block are remembered and, where a row keeps only the first c tokens, its states are restored and F is applied to
x_1 .. x_c again: the mixers run alone, sequences that keep equally many together. Attention layers are cropped as ever.
Knows neither drafts nor distributions.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

_STATES = ("conv_states", "recurrent_states")


_OF_THREAD = threading.local()  # no ContextVar: torch.compile cannot read one


class Replay:
    """The recurrent layers of a model's cache.

    Args:
        decoder: The backbone without its head.
        cache: Its cache, in which the prompt is.

    Attributes:
        mixers: The modules that read and write recurrent states, by layer.
    """

    def __init__(self, decoder: nn.Module, cache: Cache) -> None:
        self.cache = cache
        self.mixers = find_mixers(decoder, cache)
        self.before: dict[int, dict[str, dict[int, Tensor]]] = {}
        self.inputs: dict[int, Tensor] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Remembers what `keep` needs of the one backbone call that is made inside.

        Calls of other threads run the same mixers, and with them the hooks of this one: they are not looked at.
        """
        self.before = {index: _copies(self.cache.layers[index]) for index in self.mixers}
        hooks = [
            mixer.register_forward_pre_hook(self._remember(index), with_kwargs=True)
            for index, mixer in self.mixers.items()
        ]
        _OF_THREAD.recording = self
        try:
            yield
        finally:
            _OF_THREAD.recording = None
            for hook in hooks:
                hook.remove()

    def _remember(self, index: int) -> Any:
        # a hook that its thread removes while another one is about to call it gets no keyword arguments any more
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if kwargs is None or getattr(_OF_THREAD, "recording", None) is not self:
                return
            self.inputs[index] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        return hook

    @torch.no_grad()
    def keep(self, counts: list[int]) -> None:
        """Leaves every sequence's states after the first `counts[b]` tokens of the recorded block."""
        fed = next((inputs.shape[1] for inputs in self.inputs.values()), 0)
        for count in sorted(set(counts) - {fed}):
            rows = [row for row, kept in enumerate(counts) if kept == count]
            for index, mixer in self.mixers.items():
                self._replay(index, mixer, rows, count)
        self.before, self.inputs = {}, {}

    def _replay(self, index: int, mixer: nn.Module, rows: list[int], count: int) -> None:
        layer, inputs = self.cache.layers[index], self.inputs[index]
        # hooks may know the place of each sequence in the batch: peft's adapters of single sequences
        fed = list(range(len(inputs))) if any(module._forward_pre_hooks for module in mixer.modules()) else rows
        view = copy.copy(layer)
        for name, states in self.before[index].items():
            setattr(view, name, getattr(layer, name) | {i: state[fed] for i, state in states.items()})
        view.has_previous_state = dict(layer.has_previous_state)
        if count:
            mixer(inputs[torch.tensor(fed, device=inputs.device), :count], **{_cache_name(mixer): _Only(index, view)})
        for name, states in self.before[index].items():
            for i in states:
                getattr(layer, name)[i][rows] = getattr(view, name)[i][[fed.index(row) for row in rows]]


class _Only(Cache):
    """A cache with one layer, which keeps its number."""

    def __init__(self, index: int, layer: LinearAttentionCacheLayerMixin) -> None:
        super().__init__(layers=[layer] * (index + 1))


def find_mixers(decoder: nn.Module, cache: Cache) -> dict[int, nn.Module]:
    """The modules of a decoder that read and write the recurrent states of a cache, by layer.

    In a layer that also attends, attention has the same number as the mixer: transformers' mixers take `cache_params`.
    Elsewhere the innermost module with the layer's number that takes the cache is the mixer.
    """
    found: dict[int, nn.Module] = {}
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(cache.layers) or _cache_name(module) is None:
            continue
        if isinstance(cache.layers[index], LinearAttentionCacheLayerMixin) and (
            index not in found or _cache_name(found[index]) != "cache_params"
        ):
            found[index] = module
    return found


def _cache_name(mixer: nn.Module) -> str | None:
    """What a module's forward calls the cache; None where it takes none."""
    known = inspect.signature(mixer.forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in known), None)


def _copies(layer: LinearAttentionCacheLayerMixin) -> dict[str, dict[int, Tensor]]:
    """Clones of a layer's states; they are updated in place."""
    return {
        name: {i: state.clone() for i, state in getattr(layer, name).items() if state is not None} for name in _STATES
    }
