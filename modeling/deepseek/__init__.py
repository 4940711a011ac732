"""Sequential modules (DeepSeek-V3): the network, training losses, official checkpoints, retrofit, `DeepSeekMTP`."""
