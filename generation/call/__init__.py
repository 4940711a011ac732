"""What one call of `generate` carries: options, processors, sequences, outputs and the schedule of draft lengths."""
