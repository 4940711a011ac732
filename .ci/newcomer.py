"""What a newcomer tries first: a Llama, and three drafters on it, alone and in a ragged batch. The text is plain's.

Needs no file of the checkout and no network: it tests whatever versions `pip install` has brought.
"""

from __future__ import annotations

import platform
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import tokenahead
from tokenahead import EagleHead, MTPHeads, NgramDrafter

NEW_TOKENS, VOCABULARY = 40, 8
_SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def main() -> int:
    """Compare every drafter with plain decoding; return how many calls differ."""
    torch.manual_seed(0)
    # few tokens, of which untrained drafters hit some, and large weights, which keep the text from repeating one
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, vocab_size=VOCABULARY, initializer_range=0.2, pad_token_id=0)).eval()
    model.generation_config.eos_token_id = None
    drafters = {
        "n-grams": NgramDrafter(),
        "EAGLE": EagleHead.from_backbone(model, version=3),
        "HMM heads": MTPHeads.from_backbone(model, head_type="hmm", window=4, rank=4),
    }
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"tokenahead {tokenahead.__version__}, {versions}")
    wrong = 0
    for name, drafter in drafters.items():
        drafter.attach(model)
        for words, inputs in prompts().items():
            plain = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
            drafted = model.generate(**inputs, assistant_model=drafter, **options)
            per_call, is_same = drafted.speculation.tokens_per_call, plain.equal(drafted.sequences)
            wrong += not is_same
            print(f"{name}, {words}: {'the same text' if is_same else 'OTHER TEXT'}, {per_call:.2f} tokens per call")
        drafter.detach()
    return wrong


def prompts() -> dict[str, dict[str, torch.Tensor]]:
    """Return a prompt, and three of different lengths that are padded on the left."""
    rows = [torch.randint(1, VOCABULARY, (length,)) for length in (12, 5, 9)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    return {"alone": {name: tensor[:1] for name, tensor in batch.items()}, "in a ragged batch": batch}


if __name__ == "__main__":
    sys.exit(min(main(), 1))
