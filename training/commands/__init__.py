"""What the commands `train`, `evaluate` and `analyze` do: their settings, their data, models and run directories."""
