"""Draft trees: the contract between drafters and verification, and how trees are built, grown and chosen."""

from ..contract import DraftTree as DraftTree
from ..contract import VerificationResult as VerificationResult
from .building import choices_from_accuracies as choices_from_accuracies
from .building import drawn_tree as drawn_tree
from .building import dynamic_tree as dynamic_tree
from .building import ranked_tree as ranked_tree
from .building import static_tree as static_tree
