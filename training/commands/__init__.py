"""What the commands do: their settings, their data, models and run directories."""
