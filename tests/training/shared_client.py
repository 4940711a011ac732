"""Run by several processes that share a backbone: drafters learn on it and draft, and what comes out is written down.

torchrun --nproc-per-node 2 -m tests.training.shared_client FOLDER NAME...

A name says how the backbone is shared, and what learns on it: "tp hmm", "shard eagle1", "load eagle3".
"""

import datetime
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig

from tests.ptp_models import Places
from tests.training.conftest import ragged_rows
from tests.training.test_evaluation_loss import llama
from tokenahead import BlockDrafter, DeepSeekMTP, EagleHead, MTPHeads, PTPForCausalLM, PTPStudent
from tokenahead.generation.backbone.wrapped_models import load_sharded
from tokenahead.training import AcceptanceCallback, MTPTrainer, PTPOptions, PTPTrainer, TrainingStrategy
from tokenahead.training.ptp import trainer as ptp

PART = {"draft_ids": list(range(70, 90))}
SLOTS = {"num_slots": 3, "lora_rank": 2}
SMOOTH = {"features": "interpolate", "feature_dim": 3}  # others magnify rounding: they are digits of uniforms
FAMILIES = {
    "hmm": lambda backbone: MTPHeads.from_backbone(backbone, head_type="hmm", rank=2),
    "part": lambda backbone: MTPHeads.from_backbone(backbone, **PART, loss_options={"target": "teacher"}),
    "layer": lambda backbone: MTPHeads.from_backbone(backbone, head_type="layer", window=3),
    "eagle1": lambda backbone: EagleHead.from_backbone(backbone, version=1),
    "eagle3": lambda backbone: EagleHead.from_backbone(
        backbone, aux_layers=[1, 2, 3], loss_options={"steps": 2}, **PART
    ),
    "modules": lambda backbone: DeepSeekMTP.from_backbone(backbone, num_modules=2, eh_init="both"),
    "block": lambda backbone: BlockDrafter.from_backbone(backbone, layers=1, block_size=3),
    "uniforms": lambda backbone: PTPForCausalLM.from_backbone(backbone, **SLOTS, **SMOOTH),
    "masks": lambda backbone: PTPForCausalLM.from_backbone(backbone, "mask", **SLOTS, lcm_weight=0.01),
    "student": lambda backbone: PTPStudent.from_backbone(backbone, "categorical", **SLOTS, **SMOOTH),
}
NAMES = [
    *("tp hmm", "tp layer", "tp eagle1", "tp eagle3", "tp block", "tp modules"),
    *("shard part", "shard eagle3", "shard modules", "load eagle3"),
    *("tp masks", "tp student", "shard masks"),
]
LOGGED = ("loss", "num_correct", "eval_loss", "eval_expected_accepted", "eval_generated_accepted")


def save_backbone(folder: Path) -> None:
    model = llama(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "backbone")


def run(name: str, folder: Path, options: dict, processes: int = 1, rank: int = 0) -> None:
    """Three steps, a save, then greedy and sampled texts with drafts; `NAME-RANK.json` and `NAME.safetensors`."""
    way, family = name.split()
    if way == "load":
        backbone = load_sharded(folder / "backbone")
        shares = [each.to_local() for each in backbone.parameters() if isinstance(each, DTensor)]
        (folder / f"shares-{rank}.json").write_text(json.dumps(sum(each.numel() for each in shares)))
    else:
        backbone = LlamaForCausalLM.from_pretrained(folder / "backbone", **(options if way == "tp" else {}))
    readers = 1 if way == "tp" else processes
    torch.manual_seed(0)
    drafter, rows = FAMILIES[family](backbone), ragged_rows(16, 24, vocab_size=320)
    arguments = TrainingArguments(
        str(folder / "run"), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
        max_steps=3, optim="sgd", learning_rate=0.1, max_grad_norm=0.0, lr_scheduler_type="constant", eval_steps=3,
        per_device_train_batch_size=2, gradient_accumulation_steps=4 // readers, eval_strategy="steps",
        per_device_eval_batch_size=2, train_sampling_strategy="sequential", dataloader_pin_memory=False,
    )  # fmt: skip
    measured = AcceptanceCallback(rows=None, generate_every=1, prompts=1, prompt_tokens=6, new_tokens=4)
    given = {"train_dataset": rows, "eval_dataset": rows[:5], "callbacks": [measured]}
    if isinstance(drafter, PTPForCausalLM | PTPStudent):
        ptp.RandomDraws = lambda _: Places()  # what a step draws must not depend on the rank
        options = PTPOptions(completions=3, loss="kl", greedy_share=0.4)
        whole = drafter.whole if drafter.is_apart else drafter
        trainer = PTPTrainer(whole, arguments, options=options, shard_backbone=way == "shard", **given)
    else:
        strategy = TrainingStrategy(shard_backbone=way == "shard")
        trainer = MTPTrainer(drafter, arguments, strategy=strategy, **given)
    trainer.train()
    trainer.save_model(str(folder / f"{name} saved"))
    texts, ids = [], torch.arange(70, 80)[None].repeat(2, 1)
    drafts = {"assistant_model": drafter} if drafter.is_apart else {}
    for sampled in (False, True):
        torch.manual_seed(7 + rank if way == "tp" else 7)  # of a divided backbone, those of the first count
        texts.append(drafter.policy.generate(ids, max_new_tokens=8, do_sample=sampled, **drafts).tolist())
    history = [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history]
    (folder / f"{name}-{rank}.json").write_text(json.dumps([history, texts]))
    if rank == 0:
        learned = {name: each.detach() for name, each in drafter.named_parameters() if each.requires_grad}
        save_file(learned, folder / f"{name}.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    folder, names, rank = Path(sys.argv[1]), sys.argv[2:], int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(minutes=3))  # of each collective
    options = {"distributed_config": DistributedConfig(tp_plan="auto")}
    for name in names:
        run(name, folder, options, int(os.environ["WORLD_SIZE"]), rank)
    torch.distributed.barrier()
    os._exit(0)  # without the destructors of gloo's threads


if __name__ == "__main__":
    main()
