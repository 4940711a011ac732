"""Configuration of a block drafter: its body, which rows draft, and the law of a block's tokens. Imports no torch."""

# no `from __future__ import annotations`: @strict checks field types only where annotations are real types
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from .block_losses import BlockLossOptions
from .fields import check_values, refuse

LAYOUTS = ("tokenahead", "z-lab", "speculators", "deepspec")
"""Layouts of checkpoints that are written; assistants of transformers are read, too."""
SAMPLING = ("drawn", "argmax")
"""How drafts of sampled calls are chosen."""
_CIRCUIT = ("rank", "leaf_rank", "markov_rank", "markov_kind", "reads_last")
LAW_OPTIONS: dict[str, tuple[str, ...]] = {
    "independent": (),
    "markov": ("rank", "kind"),
    "selector": ("rank", "top_k"),
    "cp": _CIRCUIT,
    "hmm": _CIRCUIT,
    "btree": _CIRCUIT,
}
"""The options of every law, by the name of the law."""


@strict
class BlockDrafterConfig(Qwen3Config):
    """Options of a block drafter; sizes, rope and other fields of its layers have Qwen3's names.

    Of these, `vocab_size` is V, the backbone's vocabulary (0: not known before the drafter is attached), and
    `hidden_size` is d, the drafter's width. A row of a layer with a window w sees the positions less than w away from
    its own.

    Args:
        block_size: S, rows of a block; the first holds b, the token that the last verification added, and the others
            the mask token.
        mask_token_id: The token of rows 1 to S - 1, an id of the backbone's table.
        sample_from_anchor: True: rows 0 to S - 1 draft, each the token of the next position (DSpark). False: rows 1 to
            S - 1 draft, each the token of its own position (DFlash).
        feature_layers: Indices into transformers' `hidden_states` of the backbone (i is the input of layer i), whose
            states `fc` makes the context of.
        target_hidden_size: D, the backbone's width; None: d.
        num_target_layers: L, the backbone's layers; None: any number.
        draft_vocab_size: Vd, number of tokens that are drafted; None: V.
        own_embeddings: The drafter has its own embeddings, always frozen; otherwise it reads the backbone's.
        own_unembedding: The same of its unembedding; a draft vocabulary needs one.
        mask_embedding: The mask token has an embedding of the checkpoint in place of its row of the table.
        causal: Rows of layers without a window see the rows of the block up to their own; otherwise all of them.
        sliding_causal: The same of layers with a window.
        input_embedding_scale: Embeddings of all rows are multiplied by it.
        output_multiplier: Logits are multiplied by it, and then
        final_logit_softcapping: bent to c tanh(logits / c); None: not.
        conv_kernel_size: T, taps of the convolutions before and after every attention and MLP (DFlash 2); None: there
            are none.
        conv_group_size: Channels that share what a position adds to a kernel.
        law: Joint distribution of a block's tokens, by its name in `modeling.block.laws.LAWS`.
        law_options: Keyword arguments of that class, after this configuration (`LAW_OPTIONS`); None: its defaults.
        has_confidence: There is a head that estimates whether each draft will be accepted.
        confidence_reads_token: It reads the embedding that the law has of the token before, too.
        confidence_threshold: A chain ends before the first token whose estimate is smaller; None: it never does.
        draft_sampling: Sampled calls verify tokens that are `"drawn"`, or the likeliest ones (`"argmax"`).
        loss_options: Options of the training loss (`BlockLossOptions`, or a dict of those that are not the defaults).
        layout: Layout of `save_pretrained`.
        base_model_name_or_path: Name of the backbone that the drafter was trained for, for information.
        base_model_type: The `model_type` of that backbone's text model; None: unknown.

    Raises:
        StrictDataclassError: A value out of range, or a wrong type.
    """

    model_type = "block_drafter"
    base_model_tp_plan = None
    base_model_pp_plan = None
    keys_to_ignore_at_inference = [
        *("cache", "past_key_values", "hidden_states", "terms", "head_losses", "acceptances"),
    ]

    has_no_defaults_at_init = True

    num_hidden_layers: int = 5
    num_key_value_heads: int | None = None
    block_size: int = 8
    mask_token_id: int = 0
    sample_from_anchor: bool = True
    feature_layers: list[int] | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    own_embeddings: bool = False
    own_unembedding: bool = False
    mask_embedding: bool = False
    causal: bool = False
    sliding_causal: bool = False
    input_embedding_scale: float | int = 1.0
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int = 16
    law: str = "independent"
    law_options: dict[str, Any] | None = None
    has_confidence: bool = False
    confidence_reads_token: bool = True
    confidence_threshold: float | int | None = None
    draft_sampling: str = "drawn"
    layout: str = "tokenahead"
    base_model_name_or_path: str | None = None
    base_model_type: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    if not TYPE_CHECKING:
        loss_options: BlockLossOptions | dict | None = None
    else:  # `__post_init__` makes options of a dict or None
        loss_options: BlockLossOptions = BlockLossOptions()

    def __post_init__(self, **kwargs: Any) -> None:
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        self.use_sliding_window = "sliding_attention" in (self.layer_types or ())
        self.loss_options = BlockLossOptions.of(self.loss_options)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; of the loss, the options that are not the defaults."""
        return super().to_dict() | {"loss_options": self.loss_options.changed()}

    @property
    def first_row(self) -> int:
        """The first row that drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """m, the tokens that a block drafts."""
        return self.block_size - self.first_row

    @property
    def has_draft_vocabulary(self) -> bool:
        """Whether some tokens are never drafted."""
        return self.draft_vocab_size != self.vocab_size

    def validate_architecture(self) -> None:
        """Refuse contradictory values; the message names the field and the allowed values."""
        sizes: dict[str, str] = dict.fromkeys(("num_hidden_layers", "conv_kernel_size", "conv_group_size"), "[1, inf)")
        choices = {"layout": LAYOUTS, "draft_sampling": SAMPLING, "law": LAW_OPTIONS}
        check_values(self, choices, sizes | {"confidence_threshold": "[0, 1]"})
        drafted, kinds = self.draft_vocab_size or 0, self.layer_types or []
        unknown = sorted({*kinds} - {"full_attention", "sliding_attention"})
        taken, layers = LAW_OPTIONS[self.law], self.feature_layers or []
        others = [name for name in self.law_options or {} if name not in taken]
        refuse(
            [
                (others, f"law={self.law!r} takes the law_options {', '.join(taken) or 'none'}, not {others}"),
                (
                    self.num_drafts < 1,
                    f"block_size={self.block_size} with sample_from_anchor={self.sample_from_anchor} drafts nothing",
                ),
                (not layers or min(layers) < 0, f"feature_layers={layers} must name hidden states from 0 on"),
                (
                    not min(1, self.vocab_size) <= drafted <= self.vocab_size,
                    f"draft_vocab_size={drafted} must lie in 1..vocab_size={self.vocab_size}",
                ),
                (self.mask_token_id < 0, f"mask_token_id={self.mask_token_id} must not be negative"),
                (unknown, f"layer_types has {', '.join(unknown)}; layers are full_attention or sliding_attention"),
                (
                    "sliding_attention" in kinds and not self.sliding_window,
                    f"sliding_window={self.sliding_window} must be positive for layers of sliding_attention",
                ),
                (
                    self.has_draft_vocabulary and not self.own_unembedding,
                    f"draft_vocab_size={drafted} of {self.vocab_size} needs own_unembedding=True",
                ),
                (
                    self.conv_kernel_size is not None and self.hidden_size % self.conv_group_size != 0,
                    f"conv_group_size={self.conv_group_size} must divide hidden_size={self.hidden_size}",
                ),
            ]
        )
