"""Fields of a GenerationConfig that rule out drafts, or that our loop does not read."""

from __future__ import annotations

from transformers import GenerationConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)


def obstacle(config: GenerationConfig, of_drafts: bool = True) -> str | None:
    """What in a call rules out our loop on any backbone, in the user's words.

    Args:
        config: Of the call.
        of_drafts: Also name the caches that cannot go back, which hinder drafts alone.
    """
    for name, is_plain in _PLAIN.items():
        value = getattr(config, name, None)
        if not is_plain(value) and (of_drafts or name != "cache_implementation"):
            return f"{name}={value!r}"
    if config.penalty_alpha and (config.top_k or 0) > 1 and not config.do_sample:
        return "contrastive search (penalty_alpha)"
    if config.constraints is not None or config.force_words_ids is not None:
        return "constrained beams"
    if type(config.watermarking_config).__name__ == "SynthIDTextWatermarkingConfig":
        return "a SynthID watermark, which counts its calls"
    return None


_PLAIN = {
    "num_beams": lambda value: (value or 1) == 1,
    "use_cache": lambda value: value is not False,
    "cache_implementation": lambda value: value in (None, "dynamic", "offloaded", "static"),
    "guidance_scale": lambda value: value in (None, 1),
    "output_attentions": lambda value: not value,
    "dola_layers": lambda value: value is None,
}
"""Fields of a GenerationConfig, and which of their values leave room for speculation."""


_UNREAD = {
    "compile_config": "pass cache_implementation='static' beside it, or compile the backbone itself, by "
    "model.forward = torch.compile(model.forward)",
    "assistant_ensemble_weight": "it would change the distribution of the text, which verification keeps",
    "speculation_type": "the drafter that the call was given drafts",
}
"""Fields of a GenerationConfig that transformers' own loops read and ours does not, and what there is to do."""


def warn_of_unread(config: GenerationConfig) -> None:
    """Warns of what a call asks for and our loop does not do."""
    for name, instead in _UNREAD.items():
        value = getattr(config, name, None)
        is_read = name == "compile_config" and config.cache_implementation == "static"
        if value is not None and not is_read:
            logger.warning_once(f"{name}={value!r} is not read where drafts are verified by this library: {instead}.")
