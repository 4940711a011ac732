"""Joint distributions over the blocks of a block drafter, in equal steps and in equal processor time.

    python benchmarks/block.py --model SMOLLM2 --answers answers.npz --laws independent markov hmm-4 --steps 1000
    python benchmarks/block.py --model SMOLLM2 --answers answers.npz --laws cp-8 hmm-8 btree-8 --minutes 30
    python benchmarks/block.py --model SMOLLM2 --answers answers.npz --device cuda --steps 20000 --seed 0 1 2
    python benchmarks/block.py --results docs/results/block_laws.json --figure docs/laws.png
    tokenahead bench --methods block:block/markov-1000-0/final ...

Three layers and blocks of eight rows over the tokens that the answers have most often. A law is a name and, of
circuits, a number of states (`hmm-4`); their leaves have the bias of a Markov head, and an HMM's transitions read the
last token.
The backbone's states are stored once. Every run has a folder with its drafter, and a `result.json`: a run that has one
is not repeated. Measured along answers that no drafter has seen: acceptance by place, given the true tokens before, and
expected tokens per call of chains, at T = 1 by both rules, and greedy. Minutes are the processor's, of one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from studies import read_answers, row_of
from studies import train as fit
from transformers import AutoModelForCausalLM, PreTrainedModel

from tokenahead import BlockDrafter
from tokenahead.modeling.common import chunks
from tokenahead.modeling.common.draft_vocabulary import frequent_tokens
from tokenahead.training.evaluation import DraftMeasures
from tokenahead.training.evaluation.drafts import text_of
from tokenahead.training.features import FeatureDataset, cache_features
from tokenahead.training.states import StatesSource
from tokenahead.training.strategy import TrainingStrategy

Row = dict[str, torch.Tensor]
LAWS = ["independent", "markov", "cp-8", "hmm-8", "btree-8", "hmm-4", "hmm-16"]
HELD_OUT = 256
"""Last answers of the file, which nothing learns."""
_LOGITS_ON_GPU = 2**26


class HeldRows(StatesSource):
    """Rows of features that an accelerator holds: no step reads or moves any."""

    def __init__(self, data: FeatureDataset, device: torch.device | str) -> None:
        self.lengths = data.lengths
        self.held = [{name: values.to(device) for name, values in data[row].items()} for row in range(len(data))]

    def rows(self, numbers: Sequence[int], done: Callable[[int], object] = int) -> list[Row]:
        """See `StatesSource`."""
        return [self.held[number] for number in numbers]


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a law by its name."""
    law, _, rank = name.partition("-")
    if law not in ("cp", "hmm", "btree"):
        return {"law": law}
    return {"law": law, "law_options": {"rank": int(rank or 8)} | ({"reads_last": True} if law == "hmm" else {})}


def drafter_of(model: PreTrainedModel, name: str, draft_ids: torch.Tensor, arguments: argparse.Namespace) -> Any:
    """Return a new drafter, the same but for its law."""
    options = {"layers": 3, "block_size": arguments.block, "sample_from_anchor": False}
    made = list[BlockDrafter]()
    for law in ("independent", name):
        torch.manual_seed(arguments.init)
        made.append(BlockDrafter.from_backbone(model, draft_ids=draft_ids, **options | options_of(law)))
    first, drafter = made
    drafter.load_state_dict(first.detach().state_dict(), strict=False)
    drafter.loss_options.update(anchors=arguments.blocks, divergence=arguments.divergence)
    return drafter


def measured(drafter: Any, data: StatesSource, texts: list[tuple[torch.Tensor, int]]) -> dict[str, Any]:
    """Return acceptances by place, and expected tokens per call along texts, with their standard errors."""
    found, device = list[torch.Tensor](), drafter.device
    with torch.no_grad():
        for row in range(len(data)):
            batch = {name: values.to(device) for name, values in data.collate([data[row]]).items()}
            found.append(drafter(**batch).acceptances.cpu())
    accepted = torch.stack(found)  # [rows, m]
    spread = accepted.nan_to_num(0).std(0) / len(accepted) ** 0.5
    result: dict[str, Any] = {"acceptance": accepted.nanmean(0).tolist(), "errors": spread.tolist()}
    for temperature, rules in ((1.0, ("token", "block")), (0.0, ("greedy",))):
        measures = DraftMeasures(temperature=temperature, length=drafter.num_drafts)
        for text, prompt in texts:
            measures.add(drafter, text_of(text[None, :prompt].to(device), text[None, prompt:].to(device)))
        result |= {rule: measures.calls[rule].fields() for rule in rules}
    return result


def run(name: str, seed: int, model: PreTrainedModel, arguments: argparse.Namespace, data: dict[str, Any]) -> None:
    """Train a drafter and measure it, unless that was done."""
    budget = f"{arguments.steps}" if arguments.minutes is None else f"{arguments.minutes:g}min"
    folder = arguments.folder / f"{name}-{budget}-{seed}"
    file = folder / "result.json"
    if file.exists():
        return
    drafter = drafter_of(model, name, data["draft_ids"], arguments).to(torch.float32)
    begun, limit = time.process_time(), {"steps": arguments.steps} if arguments.minutes is None else {}
    seconds, rows = 60 * (arguments.minutes or 0), arguments.rows
    how = {"rate": arguments.rate, "seed": seed, "rows": rows, "bfloat16": arguments.bfloat16}
    trainer = fit(drafter, TrainingStrategy(), data["train"], seconds, **how, **limit)
    facts = {"law": name, "seed": seed, "steps": trainer.state.global_step, "seconds": time.process_time() - begun}
    facts |= {"parameters": sum(each.numel() for each in drafter.parameters() if each.requires_grad)}
    result = facts | measured(drafter, data["held out"], data["texts"])
    drafter.save_pretrained(folder / "final")
    file.write_text(json.dumps(result, indent=1) + "\n")


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the results in a folder."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*/result.json"))]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw acceptance by place of every law that has several seeds, with its standard error over them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="place in the draft", ylabel="accepted, given the true tokens before")
    for law in sorted({run["law"] for run in runs}, key=lambda law: LAWS.index(law)):
        places = torch.tensor([run["acceptance"] for run in runs if run["law"] == law])  # [seeds, m]
        if len(places) > 1:
            errors = places.std(0) / len(places) ** 0.5
            numbers = range(1, places.shape[1] + 1)
            axes.errorbar(numbers, places.mean(0).tolist(), errors.tolist(), capsize=3, marker="o", label=law)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def table(folder: Path) -> str:
    """Return the runs of a folder as a table."""
    lines = [
        "| law | steps | seconds | acceptance by place | token | block | greedy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in runs_of(folder):
        places = " ".join(f"{value:.3f}".removeprefix("0") for value in row["acceptance"])
        calls = " | ".join(_calls(row[rule]) for rule in ("token", "block", "greedy"))
        lines.append(f"| {row['law']} ({row['seed']}) | {row['steps']} | {row['seconds']:.0f} | {places} | {calls} |")
    return "\n".join(lines)


def _calls(fields: dict[str, float]) -> str:
    error = fields["expected_standard_error"]
    return f"{fields['expected_tokens_per_call']:.3f}" + (f" ± {error:.3f}" if error else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--answers", type=Path, help="ids, lengths and prompts of answers, .npz")
    parser.add_argument("--laws", nargs="+", default=LAWS, help="by default " + " ".join(LAWS))
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of the order of the data")
    parser.add_argument("--init", type=int, default=0, help="seed of the first weights")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="of the processor, in place of steps")
    parser.add_argument("--rows", type=int, default=8, help="answers of a step")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of an answer")
    parser.add_argument("--block", type=int, default=8, help="rows of a block")
    parser.add_argument("--divergence", default="lk")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--draft-tokens", type=int, default=8192)
    parser.add_argument("--answers-used", type=int, help="answers that are learned; all by default")
    parser.add_argument("--longest", type=int, default=512, help="tokens of an answer with its prompt")
    parser.add_argument("--texts", type=int, default=32, help="held-out answers along which calls are expected")
    parser.add_argument("--folder", type=Path, default=Path("block"), help="where everything is written")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bfloat16", action="store_true", help="where the processor multiplies bfloat16 fast")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", type=Path, help="draw what --folder or --results holds, and train nothing")
    parser.add_argument("--results", type=Path, help="runs in one file, to draw")
    arguments = parser.parse_args()
    if arguments.figure:
        results = arguments.results
        draw(json.loads(results.read_text())["runs"] if results else runs_of(arguments.folder), arguments.figure)
        return
    if arguments.answers is None:
        parser.error("--answers is needed")
    torch.set_num_threads(arguments.threads)
    if arguments.device != "cpu":
        chunks.LOGITS_PER_CHUNK = _LOGITS_ON_GPU  # fewer kernels, a GB more
        arguments.bfloat16 = True
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32").eval().to(arguments.device)
    every = read_answers(arguments.answers, arguments.longest)
    count = min(HELD_OUT, len(every) // 2)
    learned, held_out = every[:-count][: arguments.answers_used], every[-count:]
    size = min(arguments.draft_tokens, model.config.vocab_size)
    draft_ids = frequent_tokens((text[prompt:].tolist() for text, prompt in every[:-count]), size)
    of_states = drafter_of(model, "independent", draft_ids, arguments)
    data: dict[str, Any] = {"draft_ids": draft_ids, "texts": held_out[: arguments.texts]}
    for part, texts in (("train", learned), ("held out", held_out[: 2 * arguments.texts])):
        rows = [row_of(*text) for text in texts]
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bfloat16 and arguments.device == "cpu"):
            stored = cache_features(of_states, rows, arguments.folder / f"states of {part}", "bfloat16")
        data[part] = stored if arguments.device == "cpu" else HeldRows(stored, arguments.device)
    for seed in arguments.seed:
        for name in arguments.laws:
            run(name, seed, model, arguments, data)
            print(table(arguments.folder), flush=True)


if __name__ == "__main__":
    main()
