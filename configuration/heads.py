"""What a multi-token prediction head is: its family, window and rank. Knows no torch and no backbone."""

# no `from __future__ import annotations`: @strict checks field types only where annotations are real types
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .head_families import HEAD_FAMILIES, SHAPING_OPTIONS, HeadFamilyFacts, takers

HEAD_TYPES = tuple(HEAD_FAMILIES)
"""Head families that can be chosen by `MTPHeadConfig.head_type`."""

LEAVES = ("full", "shared")
"""How a head turns hidden states into logits, `MTPHeadConfig.leaf`."""


@strict
class MTPHeadConfig(PreTrainedConfig):
    """Options of a head that describes the law of the next `window` tokens.

    The same class is the sub-config `mtp_head` of a model that owns its head, and the config of `MTPHeads`, a folder
    of heads that stands apart from its backbone; only the latter needs the last three fields.

    Args:
        head_type: The family of the law. `"ff"`: independent positions (Gloeckle et al. 2024); `"cp"`: a mixture;
            `"hmm"`: a chain; `"btree"`: a binary tree of mixtures (MtPC).
        window: Number of tokens n that the law covers; the first is the ordinary next token, so a draft has n - 1.
            None lets the owner decide (EvaByte takes `num_pred_heads`).
        rank: Number of states r of every latent of a circuit; `"ff"` has 1.
        leaf: `"full"`: an unembedding [v, d] of its own per position; `"shared"`: one map [d, d] per position before
            the backbone's frozen unembedding, for large vocabularies. Circuits have one per position and state.
        contextual: The weights of a circuit's sums depend on the hidden state; otherwise they are plain parameters.
        homogeneous: All steps of an `"hmm"` share one transition.
        identity_bias: Added to the diagonal of an `"hmm"`'s transition logits at the start, so that states persist.
        gamma: Discount of the training loss: depth j weighs gamma^(j-1).
        masked_tokens: What training does with tokens inside a window that are no targets (a prompt, say): `"observe"`
            conditions on them, as decoding will; `"marginalise"` sums them out.
        hidden_size: Width of the hidden states that the head reads (heads apart from their backbone).
        vocab_size: Number of token ids (heads apart from their backbone).
        base_model_name_or_path: The backbone that the heads were trained for, for people to read.

    Raises:
        StrictDataclassError: An unknown `head_type`, a `window`, `rank` or `gamma` out of range, or a wrong type.

    Example:
        >>> MTPHeadConfig(head_type="ff", window=8).window
        8
    """

    model_type = "mtp_heads"
    base_config_key = "mtp_head"

    head_type: str = "ff"
    window: int | None = None
    rank: int = 1
    leaf: str = "full"
    contextual: bool = True
    homogeneous: bool = False
    identity_bias: float | int = 3.0
    gamma: float | int = 0.9
    masked_tokens: str = "observe"
    hidden_size: int | None = None
    vocab_size: int | None = None
    base_model_name_or_path: str | None = None
    initializer_range: float = 0.02

    def validate_architecture(self) -> None:
        """Refuses contradictory values; the message names the field and what would be right."""
        if self.head_type not in HEAD_TYPES:
            raise ValueError(f"head_type={self.head_type!r} is unknown; choose one of {', '.join(HEAD_TYPES)}")
        if self.leaf not in LEAVES:
            raise ValueError(f"leaf={self.leaf!r} is unknown; choose one of {', '.join(LEAVES)}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 (1 means: no draft)")
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if self.masked_tokens not in ("observe", "marginalise"):
            raise ValueError(f"masked_tokens={self.masked_tokens!r} is unknown; choose 'observe' or 'marginalise'")
        if not 0.0 < self.gamma <= 1.0:
            raise ValueError(f"gamma={self.gamma} must lie in (0, 1]")
        self._refuse_options_of_others()

    def _refuse_options_of_others(self) -> None:
        for name in SHAPING_OPTIONS:
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default and name not in self.family.options:
                raise ValueError(
                    f"{name}={value}: head_type={self.head_type!r} takes only {name}={default}; "
                    f"it is an option of {', '.join(takers(name))}"
                )

    @property
    def family(self) -> HeadFamilyFacts:
        """What is known of heads of this `head_type`."""
        return HEAD_FAMILIES[self.head_type]

    def options(self) -> dict[str, Any]:
        """The fields that describe the law, for a model's own `config.json`."""
        return {name: getattr(self, name) for name in self.family.written()}

    def same_parameters(self, other: "MTPHeadConfig") -> bool:
        """Whether a checkpoint of `other` holds the parameters of this head, which for `"ff"` any window does."""
        names = ["head_type", *self.family.shaping()]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def describe(self) -> str:
        """What the head is, as a phrase for people to read."""
        return self.family.description.format(**{name: getattr(self, name) for name in self.family.written()})
