"""Heads: modules, the laws they describe, their losses, and `MTPHeads`, which live apart from their backbone."""
