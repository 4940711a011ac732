"""MiMo-7B, which transformers does not know: Qwen2, tensor for tensor, and one module. Knows no torch."""

from __future__ import annotations

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    """Configuration of MiMo-7B: Qwen2's, with `num_nextn_predict_layers`.

    Example:
        >>> DeepSeekMTP.from_pretrained("XiaomiMiMo/MiMo-7B-RL")
    """

    model_type = "mimo"
