"""Verification: which drafted tokens are accepted and which token is added. Pure functions of tensors."""

from .rules import block_acceptance as block_acceptance
from .rules import coupled_acceptance as coupled_acceptance
from .rules import token_acceptance as token_acceptance
from .rules import verify as verify
from .rules import verify_sampled as verify_sampled
from .rules import verify_tree as verify_tree
from .rules import verify_tree_greedy as verify_tree_greedy
from .tree_rules import check_rule as check_rule
from .tree_rules import tree_acceptance as tree_acceptance
