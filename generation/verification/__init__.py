"""Verification: which drafted tokens are accepted and which token is added. Pure functions of tensors."""

from .chains import (
    block_acceptance,
    coupled_acceptance,
    token_acceptance,
    verify,
    verify_sampled,
    verify_tree,
    verify_tree_greedy,
)
from .drawn_trees import check_rule, tree_acceptance

__all__ = [
    "block_acceptance",
    "check_rule",
    "coupled_acceptance",
    "token_acceptance",
    "tree_acceptance",
    "verify",
    "verify_sampled",
    "verify_tree",
    "verify_tree_greedy",
]
