"""What the commands `train` and `evaluate` do: their settings, their data, models and run directories."""
