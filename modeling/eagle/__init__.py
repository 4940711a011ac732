"""EAGLE heads: layers, layouts of folders, losses, `EagleHead`."""
