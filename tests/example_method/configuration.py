"""What a GRU drafter is."""

from transformers import PreTrainedConfig


class GRUDrafterConfig(PreTrainedConfig):
    """Sizes of a drafter, which its backbone decides, and its window."""

    model_type = "example_gru_drafter"

    def __init__(self, window: int = 4, hidden_size: int = 32, vocab_size: int = 48, **kwargs) -> None:
        self.window, self.hidden_size, self.vocab_size = window, hidden_size, vocab_size
        super().__init__(**kwargs)
