"""The main model of MiMo-7B."""

from __future__ import annotations

from transformers import Qwen2ForCausalLM

from ...configuration.mimo import MiMoConfig


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's network under the name that MiMo-7B's directories, vLLM and SGLang use.

    Args:
        config: The model's configuration.
    """

    config: MiMoConfig
    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]
