"""Draft trees: the contract between drafters and verification, and how trees are built, grown and chosen."""

from .building import choices_from_accuracies, drawn_tree, dynamic_tree, ranked_tree, static_tree
from .contract import DraftTree, VerificationResult

__all__ = [
    "DraftTree",
    "VerificationResult",
    "choices_from_accuracies",
    "drawn_tree",
    "dynamic_tree",
    "ranked_tree",
    "static_tree",
]
