"""EAGLE heads: layers, layouts of directories, losses, `EagleHead`."""
