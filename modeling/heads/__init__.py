"""Heads: modules, the distributions they describe, their losses, and `MTPHeads`, which live apart from their
backbone."""
