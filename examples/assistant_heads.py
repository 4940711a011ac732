"""Heads for a model you already have: train them on its frozen backbone, save them, speculate with them.

    python examples/assistant_heads.py                      # a tiny random Llama, to see it run
    python examples/assistant_heads.py --model PATH_OR_ID   # any causal language model of transformers

The backbone writes its own training text, so the heads learn to say what it would say.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainingArguments

from tokenahead import MTPHeads
from tokenahead.training.trainer import MTPTrainer


def tiny_llama() -> PreTrainedModel:
    """Random weights, large enough for its greedy text to be repetitive."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.1, eos_token_id=None, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or Hub id; a tiny random Llama otherwise")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", help="where to save the heads; a temporary directory otherwise")
    arguments = parser.parse_args()
    backbone = AutoModelForCausalLM.from_pretrained(arguments.model) if arguments.model else tiny_llama()
    backbone.eval()
    vocabulary = backbone.config.get_text_config().vocab_size
    text = backbone.generate(torch.randint(3, vocabulary, (32, 4)), max_new_tokens=60, do_sample=False, pad_token_id=0)
    heads = MTPHeads.from_backbone(backbone, window=arguments.window)
    with tempfile.TemporaryDirectory() as scratch:
        options = TrainingArguments(
            scratch, max_steps=arguments.steps, per_device_train_batch_size=8, learning_rate=1e-2, report_to="none",
            logging_steps=20, save_strategy="no", use_cpu=backbone.device.type == "cpu",
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in text]
        MTPTrainer(heads, options, train_dataset=data).train()
        folder = arguments.output or scratch
        heads.save_pretrained(folder)
        heads.detach()
        heads = MTPHeads.from_pretrained(folder).attach(backbone)
    calls: list[int] = []
    backbone.register_forward_hook(lambda *_: calls.append(1))
    prompt = text[:1, :8]
    plain = backbone.generate(prompt, max_new_tokens=48, do_sample=False, pad_token_id=0)
    plain_calls = len(calls)
    drafted = backbone.generate(prompt, max_new_tokens=48, do_sample=False, pad_token_id=0, assistant_model=heads)
    same = torch.equal(plain, drafted)
    print(f"backbone calls: {plain_calls} plain, {len(calls) - plain_calls} with heads; same tokens: {same}")


if __name__ == "__main__":
    main()
