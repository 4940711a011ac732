"""Cache layers with an attention window, of which a block is fed, verified and taken back.

Such a layer needs the last W - 1 columns for its next token, and forgets what is older. A block pushes columns out that
are wanted again when its drafts are rejected; so while a block is verified the layer holds W - 1 columns and the
block's, and nothing older. Rows that keep fewer tokens are first moved to the right, then the layer is restricted
again: the W - 1 columns that end with a row's own last token are still there, whatever the row kept.

    W = 4, columns held           restricted     + block of 3, kept 3 and 1      repacked         restricted
    row 0                         a b c          a b c d e f                     a b c d e f      d e f
    row 1                         r s t          r s t u - -                     . . r s t u      s t u

Chunked attention has layers of the same class.
"""

from __future__ import annotations

from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer


def window_layers(cache: Cache) -> list[DynamicSlidingWindowLayer]:
    """The layers that forget columns, those apart that share another layer's keys and hold none."""
    return [layer for layer in cache.layers if type(layer) is DynamicSlidingWindowLayer and layer.is_initialized]


def hold(cache: Cache) -> None:
    """From now on nothing is forgotten, until `release`."""
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.activate_past_recording()


def restrict(cache: Cache, spare: int = 0) -> None:
    """Leaves the last W - 1 columns, and so many to spare."""
    for layer in window_layers(cache):
        first = max(layer.keys.shape[-2] - (layer.sliding_window - 1) - spare, 0)
        layer.keys, layer.values = layer.keys[..., first:, :], layer.values[..., first:, :]


def release(cache: Cache) -> None:
    """Leaves the last W - 1 columns; from now on older ones are forgotten at once, as in plain decoding."""
    restrict(cache)
    for layer in window_layers(cache):
        layer.record_past = False


def held_columns(cache: Cache) -> int | None:
    """How many of the cached columns are seen by a block, in layers with an attention window; None: there are none."""
    return next((layer.get_mask_sizes(0)[0] for layer in window_layers(cache)), None)
