"""Sequential modules (DeepSeek-V3): loading, saving, families, retrofit, `DeepSeekMTP`."""
