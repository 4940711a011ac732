"""FSDP2 in bfloat16: counts of targets arrive exactly, and losses leave the model in float32. Run by itself, this file
is the process that shards."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch

from tests.programs import Program

DEPTHS = 4
ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
ENVIRONMENT |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
ENVIRONMENT |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "ACCELERATE_MIXED_PRECISION": "bf16"}


def main(folder: str) -> None:
    from tests.training.process_client import shard_on_cpus
    from tests.training.test_evaluation_loss import llama
    from tokenahead import MTPHeads
    from tokenahead.training import MTPTrainer, TrainingStrategy

    torch.set_num_threads(1)
    shard_on_cpus()
    from transformers import TrainingArguments

    learned, found = MTPHeads.learn, []

    def learn(self, states, logits, ids, mask, positions, labels, counts, *args, **kwargs):
        output = learned(self, states, logits, ids, mask, positions, labels, counts, *args, **kwargs)
        if counts is not None:  # no trial of whether rows may be joined
            found.append({"counts": counts.tolist(), "inside": output.head_losses.tolist()})
        return output

    def sums(self, outputs, inputs):
        found[-1]["outside"] = outputs.head_losses.tolist()
        found[-1]["dtypes"] = [str(outputs.loss.dtype), str(outputs.head_losses.dtype)]
        return summed(self, outputs, inputs)

    summed, MTPHeads.learn, MTPTrainer._sums = MTPTrainer._sums, learn, sums
    torch.manual_seed(0)
    rows = [{"input_ids": (ids := torch.randint(70, 300, (133,))), "labels": ids} for _ in range(8)]
    for train in ("drafter", "all"):
        options = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_steps": 1}
        settings = TrainingArguments(folder, per_device_train_batch_size=4, **options)
        heads, strategy = MTPHeads.from_backbone(llama(), window=DEPTHS), TrainingStrategy(train=train)
        trainer = MTPTrainer(heads, settings, train_dataset=rows, strategy=strategy)
        trainer.train()
        found[-1]["sharded"] = type(trainer.model_wrapped).__name__.startswith("FSDP")
    Path(folder, "found.json").write_text(json.dumps(found))
    os._exit(0)


@pytest.mark.nightly
@pytest.mark.parametrize("train", ["drafter", "all"])
def test_counts_are_exact_and_losses_float32(train, found):
    step = found[train]
    assert step["sharded"] and step["counts"] == [4 * (132 - depth) for depth in range(DEPTHS)]
    assert step["dtypes"] == ["torch.float32", "torch.float32"]
    assert step["outside"] == pytest.approx(step["inside"], rel=1e-6)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two models saw of a step, by what learned."""
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = {"MASTER_PORT": str(server.getsockname()[1])}
    Program("-W", "ignore", __file__, folder, **ENVIRONMENT, **port).ended()
    return dict(zip(["drafter", "all"], json.loads((folder / "found.json").read_text())))


if __name__ == "__main__":
    main(sys.argv[1])
