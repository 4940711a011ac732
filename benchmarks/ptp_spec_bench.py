"""O-PTP beside the drafters of Spec-Bench: a student of SmolLM2 that learns for ninety minutes of one core.

    python benchmarks/ptp_spec_bench.py train --model HuggingFaceTB/SmolLM2-135M-Instruct --answers answers.npz
    python benchmarks/ptp_spec_bench.py measure --model ... --questions question.jsonl --results spec_bench.json

The student has three slots and so drafts two tokens, for slot 0 repeats what the model picks in the same forward, and
learns along answers that the model wrote at T = 1. It is measured along the very answers of spec_bench.json, which are
kept beside it: behind every token of an answer the slots get uniforms that pick the next three ones, and what is right
before the first wrong token is accepted by coupled verification; every number of accepted drafts leaves a whole new
draft (`slot_budget="quadratic"`). At other temperatures the uniforms are those of that distribution.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from spec_bench import Study
from studies import read_answers, row_of, train
from torch import Tensor

from tokenahead import PTPStudent
from tokenahead.modeling.ptp.inputs import GREEDY
from tokenahead.training import PTPOptions, PTPTrainer
from tokenahead.training.evaluation.decoding import named_mode
from tokenahead.training.evaluation.drafts import ExpectedCalls
from tokenahead.training.loading import load_model
from tokenahead.training.ptp.forwards import PackedBatch, Scores, Sequences, Teacher
from tokenahead.training.utils import replace_file

SLOTS, ROW = 3, 256


def learn(asked: argparse.Namespace) -> None:
    """Train a student for some minutes of processor time."""
    torch.manual_seed(asked.seed)
    model, _ = load_model(asked.model, "float32", "cpu")
    student = PTPStudent.from_backbone(model, num_slots=SLOTS, lora_rank=asked.rank, greedy=True)
    data: Any = [row_of(*text) for text in read_answers(asked.answers, ROW)]
    make = partial(PTPTrainer, options=PTPOptions(completions=asked.completions))
    how = {"rate": asked.rate, "seed": asked.seed, "rows": asked.rows, "prints": True}
    trainer = train(student.whole, make, data, 60 * asked.minutes, **how)
    print(trainer.state.global_step, "steps", flush=True)
    student.save_pretrained(asked.student)


@torch.no_grad()
def expected_calls(whole: Any, text: dict[str, Tensor], temperature: float) -> list[float]:
    """Return the tokens of an answer after its first, and the expected verifications that write them."""
    first, length = int((text["labels"] < 0).sum()), text["input_ids"].shape[1]
    sequences, starts = Sequences.of(text), torch.arange(first, length - 1)[None]
    packed = PackedBatch(whole, sequences, starts, whole.config)
    scores, shares = packed.read(), torch.rand(1, starts.shape[1], SLOTS).double()
    sampling = whole.config.sampling | {"temperature": temperature or 1.0}
    exists = torch.ones_like(starts, dtype=torch.bool)
    found = Teacher(whole, sampling).pieces(sequences, scores, starts, exists, shares)
    uniforms = found.uniforms if temperature else torch.full_like(found.uniforms, GREEDY)
    drafted = packed.slots(uniforms, lambda hidden, head: Scores(hidden, head, whole.config.vocab_size).likeliest())
    hits = (drafted.view_as(found.tokens) == found.tokens) & (found.reached if temperature else found.scored)
    accepted, positions = torch.zeros(1, length, SLOTS - 1).double(), torch.zeros(1, length, dtype=torch.bool)
    accepted[0, starts[0] - 1] = hits[0, :, 1:].double().cumprod(-1)  # slot 0 repeats what the model picks itself
    accepted[0, first - 1] = 0  # the prefill has no slots
    positions[0, first - 1 : length - 2] = True
    calls = ExpectedCalls.along(accepted, positions)
    return [int(calls.tokens), round(float(calls.calls), 4)]


def measure(asked: argparse.Namespace) -> None:
    """Write what the answers of each run of spec_bench.json take with the student, a file each beside it."""
    found = json.loads(asked.results.read_text(encoding="utf-8"))
    asked.output, asked.trained, asked.decoded = asked.results, [], []
    study = Study(asked)
    whole: Any = PTPStudent.from_pretrained(asked.student).attach(study.model).whole
    for name in asked.runs_of or [name for name in found if name != "prompts"]:
        path = asked.student / f"{name}.json"
        if path.exists():
            continue
        words, run = name.split(", run ")
        mode, counts = named_mode(words), dict[str, list[float]]()
        torch.manual_seed(int(run))
        for (prompt, *_), text in zip(study.prompts, study.texts(mode, int(run))):
            if prompt.name in found[name]["EAGLE-1"]:
                counts[prompt.name] = expected_calls(whole, text, mode.temperature)
        tokens, calls = torch.tensor(list(counts.values())).sum(0).tolist()
        print(name, len(counts), f"{tokens / calls:.3f}", flush=True)
        replace_file(path, json.dumps(counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    for name, run in (("train", learn), ("measure", measure)):
        step = steps.add_parser(name)
        step.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
        step.add_argument("--student", type=Path, default=Path("o-ptp"), help="its folder")
        step.set_defaults(run=run)
    learns, measures = steps.choices.values()
    learns.add_argument("--answers", type=Path, required=True, help="ids, lengths and prompts of answers, .npz")
    learns.add_argument("--minutes", type=float, default=90)
    learns.add_argument("--rate", type=float, default=2e-3)
    learns.add_argument("--rank", type=int, default=64, help="of the adapters")
    learns.add_argument("--rows", type=int, default=2, help="of a step")
    learns.add_argument("--completions", type=int, default=48, help="of a row")
    learns.add_argument("--seed", type=int, default=0)
    measures.add_argument("--questions", required=True, help="Spec-Bench's question.jsonl")
    measures.add_argument("--results", type=Path, required=True, help="of benchmarks/spec_bench.py, beside its answers")
    measures.add_argument("--runs-of", nargs="*", help="what is measured; all by default")
    for name, value in (("per-category", 20), ("longest", 768), ("new-tokens", 96)):
        measures.add_argument(f"--{name}", type=int, default=value)
    measures.set_defaults(dtype="float32")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.run(asked)


if __name__ == "__main__":
    main()
