"""Configurations of models and heads. Nothing here imports torch."""

from .block import BlockDrafterConfig
from .eagle import EagleHeadConfig
from .evabyte import EvaByteConfig
from .heads import HEAD_TYPES, MTPHeadConfig
from .ptp import PTPConfig, PTPStudentConfig

__all__ = [
    "HEAD_TYPES",
    "BlockDrafterConfig",
    "EagleHeadConfig",
    "EvaByteConfig",
    "MTPHeadConfig",
    "PTPConfig",
    "PTPStudentConfig",
]
