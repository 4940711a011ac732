"""Training: losses, trainer, data, evaluation, the demo and the command line."""

from .trainer import MTPTrainer

__all__ = ["MTPTrainer"]
