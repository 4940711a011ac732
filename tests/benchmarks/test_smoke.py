"""Every script of `benchmarks/` starts: at its smallest size; with `--help` where it needs an engine."""

import json
import runpy
import sys

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.benchmark_modules import ROOT
from tokenahead import EagleHead, EvaByteTokenizer
from tokenahead.training.regeneration import regenerate

FOLDER = ROOT / "benchmarks"
BLOCKS = '--dtype float32 --draft-tokens 100 --options {"law":"independent","block_size":4}'
MEASURE = "measure --model llama --folder . --questions prompts.jsonl --dtype float32"
LEARNS = "--texts 2 --methods eagle=eagle:eagle1 --output learning.json"
ANSWERS = "--model llama --questions prompts.jsonl --runs 1 --new-tokens 6"
GROUPS = "--steps 2 --group 2 --tokens 4"
SCRIPTS = {
    "analyze": "--help",
    "box_heads": "--help",
    "byte_llama": "--minutes 0.001 --width 16 --layers 1",
    "cycles": "--only n-gram --batch 1",
    "decoding": "--new-tokens 6 --rounds 1",
    "decoding, batches": "--batch 2 --prompt-length 16 --new-tokens 6 --rounds 1 --processors history --drafter ngram",
    "defaults": "run --model llama --prompts prompts.jsonl --trained eagle=eagle1 --dtype float32 --new 4",
    "drafters_table": "",
    "families_table": "--check",
    "gpu": "--smoke --drafts none --seconds 0",
    "grpo": "--model llama --head eagle1 --prompts prompts.jsonl --drafters none suffix --cpu " + GROUPS,
    "long_answers": "llama --raw --prompts prompts.jsonl --texts 2 --new-tokens 6 --methods eagle=eagle:eagle1 ngram",
    "long_answers, learning": "llama --raw --prompts prompts.jsonl --new-tokens 8 --learn-every 4 " + LEARNS,
    "memory": "eagle --vocab 64 --tokens 16 --hidden 16 --counts 1",
    "ptp_plane": "--minutes 0.001 --text llama --contexts 2 --grid 8 --figure plane.png",
    "serving": "--table",
    "smollm2": "train hydra --model llama --folder . --minutes 0.001 --dtype float32 --draft-tokens 100",
    "smollm2, blocks": "train block --model llama --folder . --answers answers.npz --rows 3 --steps 1 " + BLOCKS,
    "smollm2, measured": MEASURE + " --per-category 1",
    "smollm2, trees": MEASURE + " --greedy --budgets 3 9",
    "spec_bench": ANSWERS + " --trained EAGLE-1=eagle1 --decoded recycling --decodings greedy T=1",
    "training": "--shape tiny --length 8 --steps 1 --rounds 1",
    "training, joined": "--shape tiny --length 40 --steps 1 --rounds 1 --only EAGLE-3 --joined",
    "trees": "llama --seconds 0.1 --rows 4 --prompts 2 --new-tokens 4 --temperatures 1 --total 6 --depth 2",
}
"""Scripts (behind a comma, another way to run one), and the words of their smallest run in the directory of `work`."""
PARTS = {"analysis", "corpus", "measuring", "other_loops", "planned", "smollm2_kinds", "studies"}
PARTS |= {"gpu_evabyte", "gpu_parts", "training_tables"}
PARTS |= {f"serving_{part}" for part in ("cases", "engine", "models")}
"""Modules that scripts import."""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with a byte Llama of random weights, an EAGLE-1 head on it, and prompts."""
    from byte_llama import config_of

    folder = tmp_path_factory.mktemp("benchmarks")
    torch.manual_seed(0)
    config = config_of(32, 3)
    config.eos_token_id = 2
    model, tokenizer = LlamaForCausalLM(config), EvaByteTokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model.save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    EagleHead.from_backbone(model, version=1).save_pretrained(folder / "eagle1")
    rows = [{"question_id": number, "category": "writing", "turns": ["def main(arguments):"]} for number in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = tokenizer("q<|im_start|>assistant\nHello there, you.<|im_end|>")["input_ids"]
    written = regenerate(model, [ids] * 6, folder / "answers", max_new_tokens=16).rows
    lengths, prompts = ([len(row["ids"]) for row in written], [row["prompt"] for row in written])
    joined = np.array(sum((row["ids"] for row in written), []), dtype=np.uint16)
    np.savez(folder / "answers.npz", ids=joined, lengths=lengths, prompts=prompts)
    return folder


def test_every_file_is_listed():
    assert {path.stem for path in FOLDER.glob("*.py")} == {name.split(",")[0] for name in SCRIPTS} | PARTS


@pytest.mark.by_day(
    "analyze", "decoding, batches", "drafters_table", "families_table", "grpo", "serving", "smollm2", "spec_bench"
)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts(name, work, monkeypatch, capsys):
    threads, file = torch.get_num_threads(), f"{name.split(',')[0]}.py"
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "argv", [file, *SCRIPTS[name].split()])
    try:
        runpy.run_path(str(FOLDER / file), run_name="__main__")
    except SystemExit as end:
        assert not end.code
    finally:
        torch.set_num_threads(threads)
    assert name == "families_table" or capsys.readouterr().out
