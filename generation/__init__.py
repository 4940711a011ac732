"""How a draft is made and verified. Imports modeling only for the distributions of drafts."""

from .call.outputs import GenerateSpeculativeOutput, Speculation

__all__ = ["GenerateSpeculativeOutput", "Speculation"]
