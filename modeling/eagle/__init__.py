"""EAGLE heads: the network, training losses, conversion of other layouts, `EagleHead`."""
