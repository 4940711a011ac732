"""Training: losses, trainers, data, evaluation, the demo and the command line. Import from the modules."""
