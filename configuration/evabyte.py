"""Configuration of EvaByte models: the official fields, and the head that predicts the next bytes. Imports no torch."""

# no `from __future__ import annotations`: @strict checks field types only where annotations are real types
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, cast

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .fields import check_values
from .heads import MTPHeadConfig


@strict
class EvaByteConfig(PreTrainedConfig):
    """Configuration of a byte-level EvaByte model and of its multi-token head.

    Official `config.json` files load unchanged and unknown fields are preserved. `return_dict: false`, which the Hub's
    files carry, is ignored.

    Args:
        window_size: Tokens per EVA window; a token attends to its own window byte by byte, to earlier ones by chunk.
        chunk_size: Tokens per summary; must divide `window_size`.
        num_pred_heads: Number of next-token heads N in `lm_head.weight` of checkpoints, [N * vocab_size, hidden_size];
            a model holds the first as `lm_head` and the others as `draft_heads`.
        norm_add_unit_offset: RMSNorm multiplies by 1 + weight.
        fp32_logits: Logits are returned in float32.
        mtp_head: The head that drafts (`MTPHeadConfig` or a dict of its fields). `window` defaults to
            `num_pred_heads`; a smaller one uses the first heads, a larger one appends heads.

    Example:
        >>> config = EvaByteConfig(num_attention_heads=32, window_size=2048, chunk_size=16, num_pred_heads=8)
        >>> config.mtp_head.window
        8
    """

    model_type = "evabyte"
    auto_map: ClassVar[dict[str, str]] = {}
    """Read by TRL of every model whose class is not of transformers."""
    sub_configs = {"mtp_head": MTPHeadConfig}
    keys_to_ignore_at_inference = MTPHeadConfig.keys_to_ignore_at_inference

    vocab_size: int = 320
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    norm_add_unit_offset: bool = False
    rope_parameters: dict | None = None
    window_size: int = 512
    chunk_size: int = 256
    num_pred_heads: int = 1
    fp32_logits: bool = True
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    use_cache: bool = True
    if not TYPE_CHECKING:
        mtp_head: MTPHeadConfig | dict | None = None
    else:  # `__post_init__` makes a configuration of a dict or None
        mtp_head: MTPHeadConfig = MTPHeadConfig()

    def __post_init__(self, **kwargs: Any) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if not isinstance(self.mtp_head, MTPHeadConfig):
            self.mtp_head = MTPHeadConfig(**(self.mtp_head or {}))
        if self.mtp_head.window is None:
            self.mtp_head.window = self.num_pred_heads
        super().__post_init__(**kwargs)
        self.return_dict = True  # the Hub's files say false, which would turn every output into a tuple

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def validate_architecture(self) -> None:
        sizes = ("window_size", "chunk_size", "num_pred_heads", "num_attention_heads", "vocab_size")
        check_values(self, {}, dict.fromkeys(sizes, "[1, inf)"))
        if self.window_size % self.chunk_size:
            raise ValueError(f"window_size={self.window_size} must be a multiple of chunk_size={self.chunk_size}")
        head, family = self.mtp_head, self.mtp_head.family
        if family.apart_only:
            raise ValueError(f"mtp_head.head_type={head.head_type!r} is for attached heads (MTPHeads)")
        if family.rows_of_lm_head and head.unembedding != "own":
            raise ValueError(f"mtp_head.unembedding={head.unembedding!r}: FF heads are rows of one matrix, 'own'")
        if (head.window or 0) > self.window_size:  # a draft may cross one window border at most
            raise ValueError(f"mtp_head.window={head.window} exceeds window_size={self.window_size}")

    def to_dict(self) -> dict[str, Any]:
        """Add `rope_theta` and `rope_scaling` to `rope_parameters`, where the official code reads them."""
        output = super().to_dict()
        output["mtp_head"] = self.mtp_head.options()
        rope = dict(output.get("rope_parameters") or {})
        output["rope_theta"] = rope.pop("rope_theta", 10000.0)
        output["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        return output


def config_and_options(
    name: str | PathLike | None, config: Any = None, **options: Any
) -> tuple[EvaByteConfig, dict[str, Any]]:
    """Return the configuration to load (`config`, or where to read one), and the options that are no fields of it."""
    if isinstance(config, EvaByteConfig):
        return config, options
    if isinstance(config, PreTrainedConfig):
        return EvaByteConfig.from_dict(config.to_dict()), options
    read = EvaByteConfig.from_pretrained(config or name, return_unused_kwargs=True, **options)
    return cast(tuple[EvaByteConfig, dict[str, Any]], read)
