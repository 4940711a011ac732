"""Which families of models have sequential modules that `DeepSeekMTP` can hold, and how their files name the parts.

Inside this library a module is always named as in DeepSeek-V3: module k (from 0) of a model with L layers is
`model.layers.{L + k}`, with `enorm`, `hnorm`, `eh_proj`, `shared_head.norm` and the tensors of one decoder layer. A
family that writes other names says so here. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COUNT = "num_nextn_predict_layers"
"""The field of config.json that holds the number of modules."""


@dataclass(frozen=True)
class MTPFamily:
    """How a family lays out its modules.

    Attributes:
        names: Pairs (as in the family's files, as in DeepSeek-V3) of beginnings of names; `{index}` stands for k,
            `{layer}` for L + k. Empty where the names are DeepSeek-V3's.
        embedding_first: `eh_proj` takes [enorm(embedding); hnorm(hidden)], not [hnorm(hidden); enorm(embedding)].
        norm_before_head: There is a `shared_head.norm`; without one, h^k is what the decoder layer gives.
        copies: Official files repeat the main model's embeddings and head in every module.
        retrofit: The family has no official modules: `DeepSeekMTP.from_backbone` makes them.
    """

    names: tuple[tuple[str, str], ...] = ()
    embedding_first: bool = True
    norm_before_head: bool = True
    copies: bool = True
    retrofit: bool = False

    def renames(self, num_layers: int, num_modules: int) -> dict[str, str]:
        """Patterns of names in files and what they become, as `key_mapping` of transformers wants them.

        Args:
            num_layers: L, layers of the main model.
            num_modules: D.
        """
        pairs = self._pairs(num_layers, num_modules)
        return {"^" + theirs.replace(".", r"\."): ours for theirs, ours in pairs}

    def file_name(self, name: str, num_layers: int, num_modules: int) -> str:
        """The name that the family's files give to a tensor of DeepSeek-V3's name."""
        for theirs, ours in self._pairs(num_layers, num_modules):
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def prefixes(self, num_layers: int, k: int) -> list[str]:
        """Beginnings (of three parts) of the names of all tensors of module k, from 0, in the family's files."""
        templates = [theirs for theirs, _ in self.names if "{index}" in theirs] or ["model.layers.{layer}."]
        return [template.format(index=k, layer=num_layers + k) for template in templates]

    def _pairs(self, num_layers: int, num_modules: int) -> list[tuple[str, str]]:
        return [
            tuple(name.format(index=k, layer=num_layers + k) for name in pair)
            for k in range(num_modules)
            for pair in self.names
        ]


_DEEPSEEK = MTPFamily()
_RETROFIT = MTPFamily(copies=False, retrofit=True)
FAMILIES: dict[str, MTPFamily] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "hy_v3": MTPFamily(
        names=(("model.layers.{layer}.final_layernorm.", "model.layers.{layer}.shared_head.norm."),),
    ),
    "ernie4_5_moe": MTPFamily(
        names=(
            ("model.mtp_emb_norm.{index}.", "model.layers.{layer}.enorm."),
            ("model.mtp_hidden_norm.{index}.", "model.layers.{layer}.hnorm."),
            ("model.mtp_linear_proj.{index}.", "model.layers.{layer}.eh_proj."),
            ("model.mtp_block.{index}.", "model.layers.{layer}."),
        ),
        norm_before_head=False,
        copies=False,
    ),
    "llama": _RETROFIT,
    "qwen2": _RETROFIT,
    "qwen3": _RETROFIT,
    "mistral": _RETROFIT,
    "gemma": _RETROFIT,
}
"""Families by `model_type`."""

_STATEFUL = "its layers keep a recurrent state, which cannot go back behind a rejected draft"
_SPARSE = "its attention reads an index of its own, which the modules' cache does not hold"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "deepseek_v4",
            "glm5_next",
            "kimi_linear",
            "nemotron_h",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "qwen4_exp",
            "qwen4_exp_text",
        ),
        _STATEFUL,
    ),
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "step3p5": "its modules have heads of their own",
    "step3p7": "its modules have heads of their own",
    "mimo_v2_flash": "its modules have a sliding window and a dense block unlike the main model's last layer",
    "longcat_flash": "its modules have a dense block that the main model's layers do not have",
    "inkling": "its modules share one norm for the chain",
    "mellum": "its module has rotary positions unlike the main model's last layer",
}
"""Families with modules that are not supported, and why."""


def family_of(config: Any) -> MTPFamily:
    """The layout of a model's modules.

    Args:
        config: The model's configuration.

    Raises:
        ValueError: A family that cannot be supported (by name), that is not known, or that changes its logits after
            the head.
    """
    model_type = config.model_type
    if model_type in REFUSED:
        raise ValueError(f"DeepSeekMTP does not support model_type={model_type!r}: {REFUSED[model_type]}")
    if model_type not in FAMILIES:
        raise ValueError(f"DeepSeekMTP does not know model_type={model_type!r}; it knows {', '.join(sorted(FAMILIES))}")
    if getattr(config, "final_logit_softcapping", None):
        raise ValueError(
            f"final_logit_softcapping={config.final_logit_softcapping}: DeepSeekMTP uses the head's logits as they are"
        )
    return FAMILIES[model_type]


def count_modules(config: Any) -> int:
    """Number of modules that a configuration announces; 0 where it has no such field."""
    return int(getattr(config, COUNT, 0) or 0)
