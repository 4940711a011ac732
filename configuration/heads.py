"""Configuration of a multi-token prediction head: family, window and rank. Knows no torch and no backbone."""

# no `from __future__ import annotations`: @strict checks field types only where annotations are real types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .fields import check_values
from .head_families import CONTEXT_OPTIONS, HEAD_FAMILIES, SHAPING_OPTIONS, HeadFamilyFacts
from .loss_options import HeadLossOptions

HEAD_TYPES = tuple(HEAD_FAMILIES)
"""Head families of this library; others can be registered (`modeling.heads.family.register`)."""

CHOICES = {
    "unembedding": ("own", "shared"),
    "masked_tokens": ("observe", "marginalise"),
    "block": ("residual", "ffn"),
    "arch": ("mlp", "prefix-mlp"),
    "first": ("backbone", "own"),
    "init": ("copied", "random"),
    "mix": ("none", "weighted"),
    "mix_init": ("last", "uniform"),
}
"""Values of the fields that name something."""
_COUNTS = (
    *("window", "rank", "leaf_size", "context_rank", "num_blocks", "block_size"),
    *("draft_vocab_size", "draft_lora_rank"),
)
RANGES = {"context": "[0, 3]", "state_offset": "[0, inf)", "draft_layers": "[0, inf)"}
RANGES |= dict.fromkeys(_COUNTS, "[1, inf)")
"""Intervals of numbers."""


def _option(name: str, default: Callable[[Any], Any] = lambda config: None) -> Any:
    """Return a property that is an option of the loss; `default` is from a config to the value of None."""

    def read(config: Any) -> Any:
        value = getattr(config.loss_options, name)
        return default(config) if value is None else value

    return property(read, lambda config, value: setattr(config.loss_options, name, value))


@strict
class MTPHeadConfig(PreTrainedConfig):
    """Options of a head that describes the distribution of the next `window` tokens.

    The same class is the sub-config `mtp_head` of a model that owns its head, and the config of `MTPHeads`, heads apart
    from their backbone; only the latter needs the last three fields.

    Args:
        head_type: The family of the distribution. `"ff"`: independent positions (Gloeckle et al. 2024); `"cp"`: a
            mixture; `"hmm"`: a chain; `"btree"`: a binary tree of mixtures (MtPC); `"medusa"`, `"hydra"` and `"layer"`:
            see `head_families`, for heads apart from their backbone.
        window: Number of tokens n that the distribution covers; the first is the ordinary next token, so a draft has n
            - 1. None lets the owner decide (EvaByte takes `num_pred_heads`).
        rank: Number of states r of every latent of a circuit; `"ff"` has 1.
        unembedding: `"own"`: an unembedding [v, d] per position (circuits: and state). `"shared"`: the backbone's
            frozen one, after a map [d, d] per position (and state) for `"ff"` and circuits. None: `"own"` for these.
        contextual: The weights of a circuit's sums depend on the hidden state; otherwise they are plain parameters.
        homogeneous: All steps of an `"hmm"` share one transition.
        identity_bias: Added to the diagonal of an `"hmm"`'s transition logits at the start, so that states persist;
            None: so much that the mean diagonal is 0.85.
        leaf_size: Small leaves of a circuit: one unembedding per position, plus what a matrix [v, leaf_size] makes of a
            map [leaf_size, d] per position and state. None: each state has a whole unembedding.
        context: Leaves of `"ff"` and circuits read so many tokens of the window before theirs, at most 3.
        context_rank: Rank of these biases.
        transition_context: Transitions of an `"hmm"` read the last token, too.
        num_blocks: Blocks of every Medusa or Hydra head.
        tied_blocks: All blocks of one head, but for Hydra's first, share their weights.
        block: Of a Medusa head: `"residual"` (u + SiLU(A u + a)), or `"ffn"` with one hidden layer (Stern et al. 2018,
            blockwise parallel decoding: `unembedding="shared"`).
        block_size: Width of that hidden layer; None: 4 d.
        arch: Of Hydra heads: `"mlp"`, or `"prefix-mlp"` (Hydra++: a decoder layer over the states comes first).
        grounded: Hydra heads read the embeddings of the tokens before theirs; otherwise positions are independent.
        state_offset: Hydra heads read the state so many layers below the last.
        first: Of `"layer"` heads: position 1 is the `"backbone"`'s own, or a head of its `"own"` (Mehra et al.).
        init: New `"layer"` heads are `"copied"` from the backbone's last layer, at `"random"` only that of position 1.
        mix: `"weighted"`: a layer head reads a learned mean of the states of all layers below the last.
        mix_temperature: Of the softmax over these layers.
        mix_init: A new mean starts `"uniform"` (the paper's), or at the `"last"` of these layers.
        backbone_config: Config of the model whose decoder layer the heads copy (layer heads, Hydra++).
        draft_layers: MtPC's draft LoRA: the head reads the states of a second copy of so many of the backbone's last
            layers, with adapters of its own (families without layers).
        draft_lora_rank: Of these adapters.
        draft_lora_alpha: Their scale times their rank; None: twice the rank.
        loss_options: Options of the training loss (`HeadLossOptions`, or a dict of those that are not the defaults).
            Attributes read and set them one by one: `gamma` (which is `decay`), `loss_target`, `loss_divergence`, ...
        masked_tokens: What training does with tokens inside a window that are no targets (a prompt, say): `"observe"`
            conditions on them, as decoding will; `"marginalise"` sums them out (not where leaves read tokens).
        hidden_size: Width of the hidden states that the head reads (heads apart from their backbone, as the next two).
        vocab_size: Number of token ids.
        draft_vocab_size: Number of the tokens that are drafted; None: all.
        base_model_name_or_path: The backbone that the heads were trained for, for people to read.

    Example:
        >>> MTPHeadConfig(head_type="ff", window=8).window
        8
    """

    model_type = "mtp_heads"
    base_config_key = "mtp_head"
    keys_to_ignore_at_inference = [
        *("cache", "past_key_values", "hidden_states", "head_losses", "backbone_loss"),
        *("acceptances", "head_squares"),
    ]

    head_type: str = "ff"
    window: int | None = None
    rank: int = 1
    unembedding: str | None = None
    contextual: bool = True
    homogeneous: bool = False
    identity_bias: float | int | None = None
    leaf_size: int | None = None
    context: int = 0
    context_rank: int = 64
    transition_context: bool = False
    num_blocks: int = 1
    tied_blocks: bool = False
    block: str = "residual"
    block_size: int | None = None
    arch: str = "mlp"
    grounded: bool = True
    state_offset: int = 0
    first: str = "backbone"
    init: str = "copied"
    mix: str = "none"
    mix_temperature: float | int = 0.1
    mix_init: str = "uniform"
    backbone_config: dict | None = None
    draft_layers: int = 0
    draft_lora_rank: int = 8
    draft_lora_alpha: float | int | None = None
    masked_tokens: str = "observe"
    hidden_size: int | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None
    base_model_name_or_path: str | None = None
    initializer_range: float = 0.02
    if not TYPE_CHECKING:
        loss_options: HeadLossOptions | dict | None = None
    else:  # `__post_init__` makes options of a dict or None
        loss_options: HeadLossOptions = HeadLossOptions()

    gamma = _option("decay", lambda config: None if config.family.loss_weights else 0.9)
    loss_target = _option(
        "target", lambda config: "teacher" if config.loss_divergence == "block" else config.family.loss_target(config)
    )
    loss_divergence, loss_label_weight = map(_option, ("divergence", "label_weight"))
    position_weighting = _option("position_weighting")
    loss_weights, loss_normalization, loss_balance = map(_option, ("weights", "normalization", "balance"))

    def __post_init__(self, **kwargs: Any) -> None:
        family = HEAD_FAMILIES.get(self.head_type)  # None where `validate_architecture` will refuse the name
        self.loss_options = HeadLossOptions.of(self.loss_options)
        if self.unembedding is None and family:
            self.unembedding = family.unembedding
        super().__post_init__(**(dict(family.defaults) if family else {}) | kwargs)

    def validate_architecture(self) -> None:
        check_values(self, {"head_type": tuple(HEAD_FAMILIES), **CHOICES}, RANGES)
        self.loss_options.check()
        if (self.draft_vocab_size or 0) > (self.vocab_size or self.draft_vocab_size or 0):
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} must lie in 1..vocab_size={self.vocab_size}")
        if (weights := self.loss_options.weights) is not None and len(weights) != self.window:
            raise ValueError(f"weights={weights} of the loss must have one entry per depth: window={self.window}")
        for name, value in self._values((*SHAPING_OPTIONS, "init")).items():
            default = self.family.unembedding if name == "unembedding" else vars(MTPHeadConfig)[name]
            if value != default and name not in self.family.options:
                others = ", ".join(known for known, facts in HEAD_FAMILIES.items() if name in facts.options)
                raise ValueError(f"{name}={value}: head_type={self.head_type!r} has it not; an option of {others}")
        self.family.check(self)
        if self.draft_layers and self.family.attends(self):
            raise ValueError(f"draft_layers={self.draft_layers}: head_type={self.head_type!r} has layers of its own")

    def _values(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @property
    def family(self) -> HeadFamilyFacts:
        return HEAD_FAMILIES[self.head_type]

    @property
    def num_depths(self) -> int:
        """n: the window, which must be known by now."""
        if self.window is None:
            raise ValueError("window=None: set it before heads are built")
        return self.window

    @property
    def num_drafts(self) -> int:
        return self.num_depths - 1

    @property
    def borrows_first(self) -> bool:
        return self.family.borrows_first(self)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"loss_options": self.loss_options.changed()}

    def options(self) -> dict[str, Any]:
        """Return the fields that describe the distribution and the loss, for a model's own `config.json`."""
        changed = self.loss_options.changed()
        loss = {"loss_options": changed} if changed else {}
        context = [name for name in CONTEXT_OPTIONS if self.context and name in self.family.options]
        return self._values([*self.family.written(), *context]) | self.draft_options() | loss

    def draft_options(self) -> dict[str, Any]:
        """Return the fields of draft layers; empty where there are none."""
        return self._values(("draft_layers", "draft_lora_rank", "draft_lora_alpha")) if self.draft_layers else {}

    def same_parameters(self, other: "MTPHeadConfig") -> bool:
        """Return whether a checkpoint of `other` holds the parameters of this head (of `"ff"`, with any window)."""
        names = ["head_type", *self.family.shaping()]
        return self._values(names) == other._values(names)

    def describe(self) -> str:
        reads = f", whose leaves read the {self.context} tokens before them" if self.context else ""
        return self.family.description.format(**self._values(self.family.written())) + reads
