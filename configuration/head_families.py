"""The families of heads, without torch: their options and descriptions.

These are the torch-free parts of the records that `modeling.heads.family.register` completes; a family that is defined
elsewhere comes here by that one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

COMMON_OPTIONS = ("head_type", "window", "rank", "unembedding")
"""Options that every family writes into a model's `config.json`."""

CONTEXT_OPTIONS = ("context", "context_rank", "transition_context")
"""Options of families whose leaves may read the tokens before them; they are written where they do."""

SHAPING_OPTIONS = (
    *("rank", "unembedding", "contextual", "homogeneous", "leaf_size"),
    *("num_blocks", "tied_blocks", "block", "block_size"),
    *("arch", "grounded", "state_offset", "first", "mix"),
    *CONTEXT_OPTIONS,
)
"""Options that decide which parameters a head has; a family that lacks one leaves it at its default."""


def _never(config: PreTrainedConfig) -> bool:
    return False


@dataclass(frozen=True)
class HeadFamilyFacts:
    """The part of a family's record that needs no code of its network; "a config" is a `MTPHeadConfig`.

    Args:
        name: The value of `MTPHeadConfig.head_type`.
        description: A phrase for cards; fields of `MTPHeadConfig` in braces are filled in.
        citation: The paper that describes it, as cards name it.
        borrows_first: From a config to whether position 1 of the distribution is the backbone's own, so that a backbone
            which learns together with the head is charged once.
        paper: Its BibTeX entry, or the key of one in `model_cards/templates/citations.bib`.
        options: Fields of `MTPHeadConfig` that it takes beyond `COMMON_OPTIONS`, with `"rank"` and `"unembedding"` if
            it has a choice there.
        defaults: Options that `MTPHeadConfig` does not know, with their defaults. They decide about parameters.
        check: Raises ValueError for a config that contradicts itself; common contradictions are checked elsewhere.
        attends: From a config to whether features look at other positions; the head then has a cache of its own.
        any_window: A checkpoint serves every window, because positions share no parameters.
        rows_of_lm_head: A model that owns its head has it as further rows of its `lm_head`.
        apart_only: No model owns such a head: it is separate from its backbone (`MTPHeads`).
        sequential: Its distribution is made of conditionals alone, so that no token can be summed out.
        loss_weights: From the window n to the weights of the n depths in the family's own recipe, which holds where
            `decay` is None; None: `decay` discounts them.
        loss_target: From a config to the default of `target`.
        unembedding: Default of `unembedding`: `"own"` or `"shared"`.
    """

    name: str
    description: str
    citation: str
    borrows_first: Callable[..., bool]
    paper: str | None = None
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[..., None] = lambda config: None
    attends: Callable[..., bool] = _never
    any_window: bool = False
    rows_of_lm_head: bool = False
    apart_only: bool = False
    sequential: bool = False
    loss_weights: Callable[[int], list[float]] | None = None
    loss_target: Callable[..., str] = lambda config: "labels"
    unembedding: str = "shared"

    def written(self) -> list[str]:
        """Return the names of the options that a model's `config.json` always holds."""
        own = (name for name in self.options if name not in (*COMMON_OPTIONS, *CONTEXT_OPTIONS))
        return [*COMMON_OPTIONS, *own, *self.defaults]

    def shaping(self) -> list[str]:
        """Return the names of the options that must agree for a checkpoint of one head to fit another."""
        window = () if self.any_window else ("window",)
        return [*window, *(name for name in SHAPING_OPTIONS if name in self.options), *self.defaults]


def _discounted(factor: float) -> Callable[[int], list[float]]:
    """Weigh heads with factor, factor^2, ...; the next token, which is the backbone's own, weighs nothing."""
    return lambda window: [0.0, *(factor**k for k in range(1, window))]


def _always(config: PreTrainedConfig) -> bool:
    return True


def _has_prefix_layer(config: PreTrainedConfig) -> bool:
    return config.arch == "prefix-mlp"


def _circuit(name: str, *options: str) -> HeadFamilyFacts:
    return HeadFamilyFacts(
        name,
        "a circuit of rank {rank}",
        "MtPC",
        _never,
        "grivas2025mtpc",
        ("rank", "unembedding", "contextual", "masked_tokens", "leaf_size", "context", "context_rank", *options),
        unembedding="own",
    )


FF = HeadFamilyFacts(
    "ff",
    "independent positions",
    "Gloeckle et al. 2024",
    _never,
    "gloeckle2024better",
    ("unembedding", "context", "context_rank"),
    unembedding="own",
    any_window=True,
    rows_of_lm_head=True,
)
CP, HMM, BTREE = (
    _circuit("cp"),
    _circuit("hmm", "homogeneous", "identity_bias", "transition_context"),
    _circuit("btree"),
)
MEDUSA = HeadFamilyFacts(
    "medusa",
    "independent heads of {num_blocks} blocks each, with the unembedding `{unembedding}`",
    "Medusa, Cai et al. 2024",
    _always,
    "cai2024medusa",
    ("num_blocks", "tied_blocks", "unembedding", "block", "block_size"),
    apart_only=True,
    loss_weights=_discounted(0.8),
)
HYDRA = HeadFamilyFacts(
    "hydra",
    "heads that read the tokens drafted before them (`{arch}`)",
    "Hydra, Ankner et al. 2024",
    _always,
    "ankner2024hydra",
    ("num_blocks", "tied_blocks", "unembedding", "arch", "grounded", "state_offset", "backbone_config"),
    attends=_has_prefix_layer,
    apart_only=True,
    sequential=True,
    loss_weights=_discounted(1.0),
    loss_target=lambda config: "teacher" if _has_prefix_layer(config) else "labels",
)
LAYER = HeadFamilyFacts(
    "layer",
    "a decoder layer per head on the states below the backbone's last layer",
    "Gloeckle et al. 2024, Mehra et al. 2025",
    lambda config: config.first == "backbone",
    "gloeckle2024better",
    ("first", "mix", "mix_temperature", "mix_init", "backbone_config"),
    attends=_always,
    apart_only=True,
    loss_weights=lambda window: [1.0] * window,
)

HEAD_FAMILIES = {facts.name: facts for facts in (FF, CP, HMM, BTREE, MEDUSA, HYDRA, LAYER)}
"""All families by name: those of this library, and those that were registered since."""


def takers(option: str) -> list[str]:
    """Return the names of the families that take an option."""
    return [name for name, facts in HEAD_FAMILIES.items() if option in facts.options]
