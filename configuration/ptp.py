"""Configuration of models with parallel token prediction. Imports no torch."""

# no `from __future__ import annotations`: @strict checks field types only where annotations are real types
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from .fields import check_values

FEATURE_DIMS = {"bits": 32, "arithmetic": 24, "threshold": 32, "scalar": 1, "interpolate": 3}
"""Features of a uniform, and their default number."""
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""Settings of the distribution that drafts are learned for; here the whole distribution."""


@strict
class PTPConfig(PreTrainedConfig):
    """Configuration of `PTPForCausalLM`.

    Args:
        backbone_config: Configuration of the causal language model.
        variant: What a slot predicts: `"one_hot"`, the token that its own uniform picks (O-PTP); `"categorical"`, the
            distribution of the next one (C-PTP); `"mask"`, the same from a learned mask token and no uniform (Samragh
            et al. 2025, arXiv 2507.11851), so that the fields of uniforms (`features` to `greedy`) are idle.
        features: Features of a uniform (`uniform_features`), and `feature_dim`, how many; None: as `FEATURE_DIMS` says.
        projection: `"linear"` or `"mlp"`, from features to an embedding.
        projection_bias: Whether a linear projection has a bias.
        greedy: Slots have an embedding that requests the most likely token, with which greedy decoding drafts.
            Without it they read the median (u = 1/2), which is often another token.
        num_slots: N, the slots that a draft is learned for.
        lora_rank: Rank of the gated adapters.
        lora_alpha: Their scale is alpha / rank.
        sampling: `temperature`, `top_k` and `top_p` of the target distribution that the drafts are learned for.
        sampler: Of `"mask"`: `"mlp"`, which conditions a slot on the token drafted before it, or `"none"`.
        lcm_weight: Of `"mask"`: weight of latent consistency matching in training.
        source_fingerprint: Of the backbone as `from_backbone` found it, whose name an exported student bears.
    """

    model_type = "ptp"
    sub_configs = {"backbone_config": AutoConfig}

    if not TYPE_CHECKING:
        backbone_config: dict | PreTrainedConfig | None = None
        sampling: dict | None = None
        feature_dim: int | None = None
    else:  # `__post_init__` fills in what is None; only a config without a model has no `backbone_config`
        backbone_config: PreTrainedConfig = PreTrainedConfig()
        sampling: dict[str, Any] = {}
        feature_dim: int = 0
    variant: str = "one_hot"
    features: str = "bits"
    projection: str = "linear"
    projection_bias: bool = True
    greedy: bool = False
    num_slots: int = 8
    lora_rank: int = 16
    lora_alpha: float | int = 16
    sampler: str = "mlp"
    lcm_weight: float | int = 1.0
    initializer_range: float = 0.02
    source_fingerprint: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.backbone_config, dict):
            values = dict(self.backbone_config)
            self.backbone_config = AutoConfig.for_model(values.pop("model_type"), **values)
        self.feature_dim = self.feature_dim or FEATURE_DIMS.get(self.features)
        self.sampling = SAMPLING | (self.sampling or {})
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        choices = {"variant": ("one_hot", "categorical", "mask"), "sampler": ("mlp", "none")}
        choices |= {"features": tuple(FEATURE_DIMS), "projection": ("linear", "mlp")}
        counts = dict.fromkeys(("num_slots", "lora_rank", "feature_dim"), "[1, inf)")
        check_values(self, choices, counts | {"lcm_weight": "[0, inf)"})
        known = FEATURE_DIMS[self.features]
        if self.features in ("bits", "scalar", "interpolate") and self.feature_dim != known:
            raise ValueError(f"feature_dim={self.feature_dim}: features={self.features!r} has {known}")
        if self.greedy and not self.reads_uniforms:
            raise ValueError("greedy=True: slots of variant='mask' read mask tokens alone; leave it out")
        if unknown := set(self.sampling) - set(SAMPLING):
            raise ValueError(f"sampling has unknown fields {sorted(unknown)}; it takes {', '.join(SAMPLING)}")

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """Return the backbone's configuration, which caches and generation follow."""
        return self if self.backbone_config is None else self.backbone_config

    @property
    def vocab_size(self) -> int:
        """The backbone's."""
        return self.backbone_config.vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.backbone_config.vocab_size = value

    @property
    def reads_uniforms(self) -> bool:
        """Whether slots read uniforms; else each reads the mask of its index."""
        return self.variant != "mask"

    @property
    def has_sampler(self) -> bool:
        """Whether a slot's distribution is conditioned on the token before it as well as on its state."""
        return self.variant == "mask" and self.sampler == "mlp"

    @property
    def is_one_hot(self) -> bool:
        """Whether a slot predicts the token that its uniform picks: a group's first one that of the target itself."""
        return self.variant == "one_hot"


@strict
class PTPStudentConfig(PTPConfig):
    """Configuration of `PTPStudent`, a student without its backbone (`base_model_name_or_path`, for cards)."""

    model_type = "ptp_student"
    base_model_name_or_path: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The fields that a student and a whole model share, without the backbone's configuration."""
        return {name: getattr(self, name) for name in PTPConfig.__annotations__ if name != "backbone_config"}
