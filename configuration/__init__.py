"""What the models are: configurations. Nothing here imports torch."""

from .evabyte import EvaByteConfig
from .heads import HEAD_TYPES, MTPHeadConfig
from .ptp import PTPConfig

__all__ = ["HEAD_TYPES", "EvaByteConfig", "MTPHeadConfig", "PTPConfig"]
