"""The losses of multi-token prediction, which are defined with the models."""

from ..modeling.heads.losses import IGNORE, discounted_mtp_loss, window_targets

__all__ = ["IGNORE", "discounted_mtp_loss", "window_targets"]
