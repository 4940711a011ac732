"""Configuration of a block drafter: its body, which rows draft, its law, and its loss. Imports no torch."""

# no `from __future__ import annotations`: @strict checks field types only where annotations are real types
import json
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from .fields import check_values, refuse
from .loss_options import DIVERGENCES, LOSSES, LossOptions

TERMS = (*LOSSES, "labels", "base", "argmax", "l1", "confidence", "selector")
"""Of every place: a divergence, what block verification accepts, -log q of the text's token, the same of base logits
alone, -log q of the backbone's likeliest one, the sum of |p - q|; and of heads: the confidence's, and the selector's
choice among its candidates."""
READS_TEACHER = (*DIVERGENCES, "argmax", "l1", "confidence")
"""Terms that read the backbone's distribution."""


@dataclass(frozen=True, kw_only=True)
class BlockRecipe:
    """How a library trains block drafters."""

    terms: dict[str, dict[str, float]] = field(default_factory=dict)  # their weights by method
    names: dict[str, str] = field(default_factory=dict)  # its names of terms
    anchors: str = "next"  # blocks begin where it and the next token are targets; "inside": it is one, but the last S
    places: str = "own"  # count whose token is a target; of these those before any other ("whole"); or by "rows"
    is_restricted: bool = False  # the backbone's distribution is that of drafted tokens alone
    normaliser: str = "weights"  # terms are divided by the weights of places that count, or by their number
    dpace: str = "places"  # the same of weights by D-PACE, or by the number of sequences (`"batch"`)
    within: bool = True  # blocks end with their document


_LABELS = {"dflash": {"labels": 1.0}, "dflash2": {"labels": 1.0}, "domino": {"labels": 1.0}}
RECIPES = {
    "tokenahead": BlockRecipe(),
    "z-lab": BlockRecipe(terms=_LABELS, names={"ce": "labels"}, dpace="batch"),
    "deepspec": BlockRecipe(
        terms=_LABELS | {"dspark": {"labels": 0.1, "l1": 0.9}}, names={"ce": "labels"}, places="whole"
    ),
    "speculators": BlockRecipe(
        terms={"dflash": {"kl": 1.0}, "dspark": {"argmax": 0.1, "tv": 0.9}, "dflash2": {"kl": 1.0}},
        names={"ce": "argmax", "kl_div": "kl"},
        anchors="inside",
        places="rows",
        is_restricted=True,
        normaliser="places",
        within=False,
    ),
}


@dataclass(kw_only=True)
class BlockLossOptions(LossOptions):
    """How the loss of a block drafter is computed.

    Attributes:
        divergence: Of the layout `"tokenahead"`, which has no other terms with these weights.
        decay: Place k of a block weighs decay^k, k from 0 on; None: exp(-1 / gamma).
        gamma: See `decay`.
        weights: `"decay"`, or `"dpace"`: by the probability that the places before are accepted (D-PACE).
        layout: Whose recipe: `"tokenahead"`, `"z-lab"` (SpecForge), `"deepspec"` or `"speculators"`.
        method: `"dflash"`, `"dspark"`, `"dflash2"` or `"domino"`; None: by the drafter's law.
        terms: Weights of terms in the words of the layout, the name of one, or JSON; None: the recipe's. Those of the
            heads that a drafter has are 1 where they are left out.
        anchors: Blocks of every sequence; fewer where it has fewer places to begin.
    """

    divergence: str = "lk"
    decay: float | None = None
    gamma: float = 4.0
    weights: str = "decay"
    layout: str = "tokenahead"
    method: str | None = None
    terms: dict[str, float] | str | None = None
    anchors: int = 512

    _choices = LossOptions._choices | {
        "weights": ("decay", "dpace"),
        "layout": tuple(RECIPES),
        "method": (None, "dflash", "dspark", "dflash2", "domino"),
        "position_weighting": ("uniform",),
    }
    _ranges = LossOptions._ranges | {"gamma": "(0, inf)", "anchors": "[1, inf)"}

    def check(self) -> None:
        super().check()
        self.weighted_terms("dspark")

    def recipe(self, method: str) -> BlockRecipe:
        """Return the layout's recipe of a method; SpecForge trains DSpark as DeepSpec does."""
        is_dspark = self.layout == "z-lab" and (self.method or method) == "dspark"
        return RECIPES["deepspec" if is_dspark else self.layout]

    def weighted_terms(self, method: str) -> dict[str, float]:
        """Return the weights of the terms of a method, by their names in `TERMS`."""
        recipe, terms = self.recipe(method), self.terms
        if isinstance(terms, str):
            terms = json.loads(terms) if terms.startswith("{") else {terms: 1.0}
        if terms is None and not recipe.terms:
            share = self.label_weight if self.target == "teacher" else 1.0
            found = {self.divergence: 1 - share, "labels": share}
            return {name: weight for name, weight in found.items() if weight}
        if terms is None:
            return dict(recipe.terms.get(self.method or method) or recipe.terms["dspark"])
        found = {recipe.names.get(name, name): weight for name, weight in terms.items() if name != "gamma"}
        if unknown := [name for name in found if name not in TERMS]:
            known = ", ".join([*recipe.names, *TERMS])
            raise ValueError(f"terms={self.terms!r} has {unknown[0]!r}, which is none; choose of {known}")
        return found

    def rate(self) -> float:
        """Return by how much less every place counts than the one before it."""
        return exp(-1 / self.gamma) if self.decay is None else self.decay


LAYOUTS = ("tokenahead", "z-lab", "speculators", "deepspec")
"""Layouts of checkpoints that are written; assistants of transformers are read, too."""
_CIRCUIT = ("rank", "leaf_rank", "markov_rank", "markov_kind", "reads_last")
LAW_OPTIONS: dict[str, tuple[str, ...]] = {
    "independent": (),
    "markov": ("rank", "kind"),
    "domino": ("rank", "state_size", "free_places"),
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
        body: Whose layers it has: `"qwen3"`, or `"gemma4"`: four norms, values normed, attention unscaled.
        keys_are_values: Values of layers of Gemma 4 are made by the map to keys (`attention_k_eq_v`).
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
    """

    model_type = "block_drafter"
    base_model_tp_plan = None
    base_model_pp_plan = None
    keys_to_ignore_at_inference = [
        *("cache", "past_key_values", "hidden_states", "terms", "head_losses", "acceptances")
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
    body: str = "qwen3"
    keys_are_values: bool = False
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
        sizes: dict[str, str] = dict.fromkeys(("num_hidden_layers", "conv_kernel_size", "conv_group_size"), "[1, inf)")
        choices = {"layout": LAYOUTS, "draft_sampling": ("drawn", "argmax"), "law": LAW_OPTIONS}
        choices |= {"body": ("qwen3", "gemma4")}
        check_values(self, choices, sizes | {"mask_token_id": "[0, inf)", "confidence_threshold": "[0, 1]"})
        drafted, kinds, law = self.draft_vocab_size or 0, self.layer_types or [], self.law
        unknown = sorted({*kinds} - {"full_attention", "sliding_attention"})
        layers, others = self.feature_layers or [], sorted((self.law_options or {}).keys() - {*LAW_OPTIONS[law]})
        vocab = self.vocab_size
        is_partial = self.has_draft_vocabulary and not self.own_unembedding
        has_no_window = "sliding_attention" in kinds and not self.sliding_window
        is_alien = self.body == "qwen3" and self.keys_are_values or self.body == "gemma4" and self.conv_kernel_size
        is_ungrouped = self.conv_kernel_size is not None and self.hidden_size % self.conv_group_size != 0
        refusals = [
            (others, f"law={law!r} takes the law_options {', '.join(LAW_OPTIONS[law]) or 'none'}, not {others}"),
            (self.num_drafts < 1, f"block_size={self.block_size} drafts nothing"),
            (not layers or min(layers) < 0, f"feature_layers={layers} must name hidden states from 0 on"),
            (not min(1, vocab) <= drafted <= vocab, f"draft_vocab_size={drafted} must lie in 1..vocab_size={vocab}"),
            (unknown, f"layer_types has {', '.join(unknown)}; layers are full_attention or sliding_attention"),
            (has_no_window, f"sliding_window={self.sliding_window} must be positive for sliding_attention"),
            (is_partial, f"draft_vocab_size={drafted} of {vocab} needs own_unembedding=True"),
            (is_alien, f"body={self.body!r}: keys_are_values is Gemma 4's, and conv_kernel_size Qwen3's"),
            (is_ungrouped, f"conv_group_size={self.conv_group_size} must divide hidden_size={self.hidden_size}"),
        ]
        refuse(refusals)
