"""A circuit for EvaByte, from its own heads.

python examples/train_evabyte.py EvaByte/EvaByte-SFT data/chats.jsonl
"""

import sys

import torch
from datasets import load_dataset
from trl import SFTConfig

from tokenahead import EvaByteForMTPC, EvaByteTokenizer
from tokenahead.training import MTPSFTTrainer, TrainingStrategy


def main(model_name: str, file: str, folder: str = "evabyte-btree") -> None:
    """Trains the head alone; the backbone stays bit for bit what it was."""
    model = EvaByteForMTPC.from_pretrained(model_name, mtp_head={"head_type": "btree", "window": 16, "rank": 32})
    trainer = MTPSFTTrainer(
        model,
        SFTConfig(
            folder, assistant_only_loss=True, max_length=8192, learning_rate=3e-4, bf16=torch.accelerator.is_available()
        ),
        strategy=TrainingStrategy(train="drafter"),
        train_dataset=load_dataset("json", data_files=file, split="train"),
        processing_class=EvaByteTokenizer(),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
