"""Rollouts of a policy that two processes share (FSDP2): the texts of plain ones, in fewer forwards, and learning."""

import json

import pytest

from tests.programs import ROOT, Program

pytestmark = pytest.mark.nightly
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.families import family_model
from tests.models import tiny_model
from tests.training.process_client import shard_on_cpus
from tests.training.test_rollouts import rollouts

shard_on_cpus()
found, folder, rank = {}, Path(sys.argv[1]), os.environ["RANK"]
common = dict(use_cpu=False, gradient_checkpointing=False)
for drafter in ("plain", "suffix", "eagle"):
    _, forwards, written = rollouts("grpo", drafter, folder / drafter, top_k=1, learning_rate=0.0, **common)
    found[drafter] = [[ids for ids, _ in written], forwards]
log, _, written = rollouts("grpo", "eagle", folder / "learns", learning_rate=1e-3, **common)
plain, _, _ = rollouts("grpo", "plain", folder / "given", learning_rate=1e-3, given=written, **common)
found["logs"] = [[[row[name] for name in ("loss", "reward", "grad_norm")] for row in each] for each in (log, plain)]
found["own"] = {}
modules, heads = family_model("llama", num_nextn_predict_layers=2), tiny_model(num_pred_heads=4)
for name, model, units in (("modules", modules, [*modules.main.model.layers, *modules.mtp]),
                           ("heads", heads, [*heads.model.layers])):
    model.generation_config.eos_token_id = None
    ids = torch.randint(2, 60, (2, 6 + 3 * int(rank)))
    common = dict(attention_mask=torch.ones_like(ids), max_new_tokens=16, pad_token_id=0)
    plain = model.generate(ids, use_mtp=False, **common)
    for unit in (*units, model):
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    drafted = model.generate(ids, use_mtp=True, return_dict_in_generate=True, **common)
    rows = drafted.speculation.rows_drafts
    found["own"][name] = torch.equal(drafted.sequences, plain) and any(map(len, sum(rows, [])))
(folder / f"{rank}.json").write_text(json.dumps(found))
os._exit(0)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What both processes found."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "client.py").write_text(SCRIPT)
    settings = ["--config_file", str(ROOT / "examples" / "accelerate" / "fsdp2.yaml"), "--main_process_port", "0"]
    Program("-m", "accelerate.commands.launch", *settings, folder / "client.py", folder).ended(600)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("drafter", ["suffix", "eagle"])
def test_rollouts_of_a_sharded_policy_draft_and_write_the_same_texts(drafter, runs):
    for found in runs:
        (plain, most), (texts, forwards) = found["plain"], found[drafter]
        assert texts == plain and forwards < most


def test_texts_that_were_drafted_are_learned_from_as_plain_ones(runs):
    """The head learns between the steps of the sharded policy, whose embeddings it reads."""
    for found in runs:
        drafted, plain = found["logs"]
        assert any(norm > 1e-3 for *_, norm in drafted)
        assert drafted == [pytest.approx(row, rel=1e-6, abs=1e-6) for row in plain]


@pytest.mark.parametrize("kind", ["modules", "heads"])
def test_sharded_models_that_draft_for_themselves_write_the_same_texts(kind, runs):
    assert all(found["own"][kind] for found in runs)
