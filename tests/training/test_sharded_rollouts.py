"""Rollouts of a policy that two processes share (FSDP2): the texts of plain ones, in fewer forwards, and learning."""

import json

import pytest

from tests.programs import ROOT, Program

pytestmark = pytest.mark.nightly
SCRIPT = """
import json, os, sys
from pathlib import Path
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
