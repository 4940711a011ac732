"""A tokenizer of one letter per token, for stop strings of small models."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def letters(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token i is the i-th letter."""
    known = {chr(97 + index if index < 26 else 0x100 + index): index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
