"""Whether a backbone is used here as it uses itself, found out by two calls with eight tokens.

Kinds of masks, rotary positions by layer, scaled embeddings, residuals and logits, layers that need more than their
input: each would show as a difference between the backbone's own call and ours. Knows no family.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .modules import MTPModules
from .readout import Readout

_LENGTH, _PADDING = 8, 3


@torch.no_grad()
def check_backbone(main: PreTrainedModel, modules: MTPModules, layer: nn.Module) -> None:
    """Compares the backbone's own calls with ours, without padding and behind left padding.

    Args:
        main: The backbone.
        modules: Modules whose first block is still a copy of `layer`.
        layer: The layer of the backbone that was copied.

    Raises:
        ValueError: Logits or the layer's output differ.
    """
    if any(weight.device.type == "meta" for weight in main.parameters()):
        return  # weights that are offloaded are not there to be compared
    was_training = main.training
    main.eval()
    try:
        for padding in (0, _PADDING):
            _check(main, modules, layer, padding)
    finally:
        main.train(was_training)


def _check(main: PreTrainedModel, modules: MTPModules, layer: nn.Module, padding: int) -> None:
    ids = (torch.arange(2 * _LENGTH, device=main.device) * 7 % main.config.vocab_size).view(2, _LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": mask, "position_ids": position_ids, "use_cache": False}
    seen: dict[str, torch.Tensor] = {}
    hook = layer.register_forward_hook(_remember(seen), with_kwargs=True)
    try:
        want = main(input_ids=ids, **inputs).logits
    finally:
        hook.remove()
    embeds = main.get_input_embeddings()(ids)
    got = Readout(main)(main.get_decoder()(inputs_embeds=embeds, **inputs).last_hidden_state)
    _compare(main, "its logits are not what its head makes of its states", got, want, mask)
    copied = modules[0].run(seen["input"], **modules.options(0, seen["input"], position_ids, mask))
    _compare(main, "its layer, called apart, gives other states", copied, seen["output"], mask)


def _remember(seen: dict[str, torch.Tensor]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen["input"] = args[0] if args else kwargs["hidden_states"]
        seen["output"] = output[0] if isinstance(output, tuple) else output

    return hook


def _compare(main: PreTrainedModel, what: str, got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor) -> None:
    difference = (got - want).abs()[mask.bool()].max().item()
    largest = want.abs()[mask.bool()].max().item()
    if not difference <= largest * (1e-5 if want.dtype == torch.float32 else 0.05):
        raise ValueError(
            f"from_backbone does not support this {main.config.model_type}: {what} (off by {difference:.3g} of "
            f"{largest:.3g})"
        )
