"""The losses of multi-token prediction, where a trainer looks for them; they live beside the models."""

from ..modeling.heads.losses import IGNORE, depth_means, discounted_mtp_loss, window_targets

__all__ = ["IGNORE", "depth_means", "discounted_mtp_loss", "window_targets"]
