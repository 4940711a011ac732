"""Training of parallel token prediction: sequences, rows, teacher, losses, trainer."""
