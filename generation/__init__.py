"""How a draft is made and judged. Imports modeling only for the laws of drafts."""

from .statistics import GenerateSpeculativeOutput, Speculation

__all__ = ["GenerateSpeculativeOutput", "Speculation"]
