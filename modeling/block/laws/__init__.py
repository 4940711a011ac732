"""The laws of block drafters: `LAWS` names their classes, which are made of a configuration and their own options."""

from .base import BlockLaw, IndependentLaw
from .circuits import BTreeLaw, CPLaw, HMMLaw
from .markov import ConfidenceHead, MarkovLaw
from .selector import SelectorLaw

LAWS: dict[str, type[BlockLaw]] = {
    "independent": IndependentLaw,
    "markov": MarkovLaw,
    "selector": SelectorLaw,
    "cp": CPLaw,
    "hmm": HMMLaw,
    "btree": BTreeLaw,
}

__all__ = ["LAWS", "BlockLaw", "ConfidenceHead", "SelectorLaw"]
