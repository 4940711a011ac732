"""Models with different tokenizers that learned the same text; several tests share them."""

import json
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.backbones import backbone, learn

_NAMES = ["value", "total", "größe", "数量"]
TEXT = "".join(
    f"def add_{_NAMES[i % 4]}(self, {_NAMES[i % 3]}):\n    self.{_NAMES[i % 4]} += {_NAMES[i % 3]}\n" for i in range(40)
)
_KINDS = {
    "bytes": (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "words": (pre_tokenizers.Metaspace(), decoders.Metaspace()),
}


@cache
def tokenizer(size: int, kind: str = "bytes", text: str = TEXT) -> PreTrainedTokenizerFast:
    """A tokenizer of a text: byte-level, so that letters may be two tokens; or of words that begin with ▁."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = _KINDS[kind]
    special = ["<unk>", f"<{kind}>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    made.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=special[1], pad_token="<unk>", unk_token="<unk>")


@cache
def with_bytes(size: int = 330) -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2's: a space before all, words that begin with ▁, and bytes of letters that it lacks."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", *every_byte], show_progress=False)
    made.train_from_iterator([TEXT.replace("数量", "")], trainer)
    saved = json.loads(made.to_str())
    saved["added_tokens"] = saved["added_tokens"][:1]  # bytes are ordinary tokens
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(saved)), unk_token="<unk>")


@cache
def speaker(name: str, size: int, kind: str = "bytes", steps: int = 80) -> PreTrainedModel:
    """A backbone that learned the text in ids of such a tokenizer."""
    ids = tokenizer(size, kind)(TEXT, add_special_tokens=False)["input_ids"]
    return learn(backbone(name, vocabulary=size), torch.tensor(ids), steps)


def prompts(count: int, size: int) -> list[torch.Tensor]:
    """Cuttings of the text in ids of a byte-level tokenizer, in five lengths."""
    ids = tokenizer(size)(TEXT, add_special_tokens=False)["input_ids"]
    return [torch.tensor(ids[7 * i : 7 * i + [3, 12, 6, 20, 9][i % 5]]) for i in range(count)]
