"""Training of parallel token prediction: completions, teacher, losses, trainer."""
