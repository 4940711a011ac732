"""How a draft is made and verified. Imports modeling only for the distributions of drafts."""

from .call.sequences import Speculation
from .results import GenerateSpeculativeOutput

__all__ = ["GenerateSpeculativeOutput", "Speculation"]
