"""An EAGLE head, a sequential module or a PTP student for a causal language model.

python examples/train_drafters.py eagle Qwen/Qwen3-0.6B trl-lib/Capybara
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from tokenahead import DeepSeekMTP, EagleHead, PTPForCausalLM
from tokenahead.training import MTPSFTTrainer, PTPSFTTrainer, TrainingStrategy

FROZEN = {"strategy": TrainingStrategy(train="drafter")}
KINDS = {
    "eagle": (MTPSFTTrainer, lambda backbone: EagleHead.from_backbone(backbone, version=3), FROZEN),
    "modules": (MTPSFTTrainer, lambda backbone: DeepSeekMTP.from_backbone(backbone, num_modules=1), FROZEN),
    "parallel": (PTPSFTTrainer, lambda backbone: PTPForCausalLM.from_backbone(backbone, num_slots=4), {}),
}


def main(kind: str, model_name: str, dataset_name: str, folder: str = "drafter") -> None:
    """Trains a new drafter on the frozen backbone."""
    trainer_class, make, options = KINDS[kind]
    trainer = trainer_class(
        make(AutoModelForCausalLM.from_pretrained(model_name, dtype="auto")),
        SFTConfig(folder, max_length=1024, learning_rate=3e-4, bf16=torch.accelerator.is_available()),
        train_dataset=load_dataset(dataset_name, split="train"),
        processing_class=AutoTokenizer.from_pretrained(model_name),
        **options,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
