"""Heads for any causal language model, as one would fine-tune with TRL.

python examples/train_heads.py Qwen/Qwen3-0.6B trl-lib/Capybara
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from tokenahead import MTPHeads
from tokenahead.training import AcceptanceCallback, MTPSFTTrainer


def main(model_name: str, dataset_name: str, folder: str = "heads") -> None:
    """Trains heads and leaves them in a directory of their own."""
    data = load_dataset(dataset_name, split="train").train_test_split(0.01, seed=0)
    backbone = AutoModelForCausalLM.from_pretrained(model_name, dtype="auto")
    trainer = MTPSFTTrainer(
        MTPHeads.from_backbone(backbone, head_type="btree", window=8, rank=8),
        SFTConfig(
            folder,
            packing=True,
            max_length=2048,
            learning_rate=3e-4,
            eval_strategy="steps",
            eval_steps=200,
            bf16=torch.accelerator.is_available(),
        ),  # fmt: skip
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=AutoTokenizer.from_pretrained(model_name),
        callbacks=[AcceptanceCallback()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
