"""Configuration of an EAGLE head: its version, its layers and their inputs. Imports no torch."""

# no `from __future__ import annotations`: @strict checks field types only where annotations are real types
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from .fields import check_values, refuse
from .loss_options import EagleLossOptions

LAYOUTS = ("tokenahead", "official", "specforge", "speculators", "vllm", "sglang")
"""Layouts of checkpoints that are written and read."""


@strict
class EagleHeadConfig(LlamaConfig):
    """Options of an EAGLE head; sizes, rope and other fields of its layers have Llama's names.

    Of these, `vocab_size` is V, the backbone's vocabulary, and `hidden_size` is d, the head's width; with
    `attention_bias` q, k and v have biases (o never has).

    Args:
        version: 1 for EAGLE-1, EAGLE-2 and HASS (the feature is the backbone's last hidden state, and its unembedding
            reads the head's output); 3 for EAGLE-3 and 3.1 (several hidden states, its own unembedding).
        draft_vocab_size: Vd, number of tokens that are drafted; None: V.
        target_hidden_size: D, the backbone's width; None: d.
        fc_bias: `fc` has a bias.
        qk_norm: Queries and keys are normed per attention head (Qwen3).
        own_embeddings: The head has its own embeddings, always frozen; otherwise it reads the backbone's.
        aux_layers: Indices into transformers' `hidden_states` (i is the input of layer i); None: 2, L // 2, L - 3 for L
            layers.
        use_aux_hidden_state: False: the feature of version 3 is the last hidden state, without `fc`.
        norm_before_residual: The first layer's residual is the normed feature.
        norm_before_fc: One norm over all auxiliary states, before `fc`.
        fc_norm: One norm for each auxiliary state, before `fc` (EAGLE-3.1).
        norm_output: The feature that a row returns is normed (EAGLE-3.1).
        layer_types: "full_attention" or "sliding_attention" for each layer; None: all are full.
        sliding_window: How far back rows see in sliding layers, themselves included.
        mask_token_id: P-EAGLE: all drafts but the first come from rows of this token and of learned states
            (`mask_hidden`), which run at once; None: a row after the other.
        draft_length: Tokens of a draft where no option sets a number, the length that pays for this backbone; None: 5,
            as in published chains.
        loss_options: Options of the training loss (`EagleLossOptions`, or a dict of those that are not the defaults).
        layout: Layout of `save_pretrained`.
        base_model_name_or_path: Name of the backbone that the head was trained for, for information.
        base_model_type: The `model_type` of that backbone's text model; None: unknown.

    Example:
        >>> EagleHeadConfig(hidden_size=64, num_attention_heads=4, vocab_size=1000, draft_vocab_size=200).version
        3
    """

    model_type = "eagle_head"
    base_model_tp_plan = None
    base_model_pp_plan = None
    keys_to_ignore_at_inference = [
        *("cache", "past_key_values", "hidden_states", "step_losses", "head_losses", "acceptances")
    ]

    version: int = 3
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_hidden_layers: int = 1
    fc_bias: bool = False
    qk_norm: bool = False
    own_embeddings: bool = False
    aux_layers: list[int] | None = None
    use_aux_hidden_state: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    mask_token_id: int | None = None
    draft_length: int | None = None
    layout: str = "tokenahead"
    base_model_name_or_path: str | None = None
    base_model_type: str | None = None
    if not TYPE_CHECKING:
        loss_options: EagleLossOptions | dict | None = None
    else:  # `__post_init__` makes options of a dict or None
        loss_options: EagleLossOptions = EagleLossOptions()

    def __post_init__(self, **kwargs: Any) -> None:
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        self.loss_options = EagleLossOptions.of(self.loss_options)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        kinds = {} if self.sliding_window is not None else {"layer_types": None}
        return super().to_dict() | {"loss_options": self.loss_options.changed()} | kinds

    @property
    def windows(self) -> dict[str, int | None]:
        """How far back rows see by kind of layer, themselves included; None: as far as there are columns."""
        sizes = {"full_attention": None, "sliding_attention": self.sliding_window}
        return {kind: sizes[kind] for kind in self.layer_types or ["full_attention"]}

    @property
    def num_aux(self) -> int:
        """Number of hidden states that `fc` reads; 0 where it reads none."""
        if self.version == 1 or not self.use_aux_hidden_state:
            return 0
        return 3 if self.aux_layers is None else len(self.aux_layers)

    def validate_architecture(self) -> None:
        """Refuse contradictory values; the message names the field and the allowed values."""
        sizes: dict[str, str] = dict.fromkeys(("num_hidden_layers", "draft_length"), "[1, inf)")
        check_values(self, {"version": (1, 3), "layout": LAYOUTS}, sizes)
        self.loss_options.resolved(self.version)
        first, drafted, mask = self.version == 1, self.draft_vocab_size or 0, self.mask_token_id
        names = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
        used = {name for name in names if getattr(self, name)}
        kinds, window = {*(self.layer_types or ())}, self.sliding_window
        has_no_size = ("sliding_attention" in kinds) != (window is not None) or (window or 1) < 1
        is_unknown = kinds - {"full_attention", "sliding_attention"}
        only_aux, last = used.intersection(names[:2]), self.vocab_size - 1
        is_odd = mask is not None and (first or not 0 <= mask <= last)
        refusals = [
            (not 1 <= drafted <= self.vocab_size, f"draft_vocab_size={drafted} must lie in 1..{self.vocab_size}"),
            (first and used, f"{', '.join(sorted(used))}: options of version 3, not of version=1"),
            (not self.use_aux_hidden_state and only_aux, f"{', '.join(only_aux)} needs use_aux_hidden_state=True"),
            (is_odd, f"mask_token_id={mask} is for version 3, and lies in 0..{last}"),
            (len(only_aux) > 1, "norm_before_fc and fc_norm exclude each other"),
            (is_unknown or has_no_size, f"layer_types={self.layer_types} with sliding_window={window}"),
            (self.aux_layers == [], "aux_layers is empty; name at least one hidden state"),
        ]
        refuse(refusals)
