"""README's quick start of parallel token prediction on a chain whose distribution is known: what is learned, and what
it pays.

    python benchmarks/ptp_chain.py                       # about six minutes of one core
    python benchmarks/ptp_chain.py --layers 12 --width 256

A small Llama learns a Markov chain of order one (8 states); its student is what `PTPForCausalLM.from_backbone` and
`PTPTrainer` make by default. *Right* is how many drafted tokens are right before the first wrong one on held-out text,
teacher-forced, beside the best that drafters without dependence could do. Then texts are written with drafts and
without, by turns, in processor time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from markov import MarkovChain, ceilings
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from tokenahead import PTPForCausalLM
from tokenahead.training import PTPTrainer

STATES, ALPHA, LENGTH = 8, 0.3, 64
MODES: dict[str, dict[str, Any]] = {
    "sampled, coupled": {"do_sample": True, "top_k": 0, "seed": 7, "verification": "coupled"},
    "greedy": {"do_sample": False},
}


class Texts(Dataset):
    """Sequences of the chain."""

    def __init__(self, chain: MarkovChain, count: int, seed: int) -> None:
        self.ids = chain.texts(count, LENGTH, seed)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train(kind: type[Trainer], model: Any, data: Dataset, steps: int, held_out: Dataset, **options: Any) -> str:
    """Trains, and tells seconds of processor time and what an evaluation says."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=steps, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
            logging_strategy="no", **options,
        )  # fmt: skip
        trainer, started = kind(model, arguments, train_dataset=data), time.process_time()
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        seconds = time.process_time() - started
        found = trainer.evaluate(held_out)
    model.eval()
    told = {name.removeprefix("eval_"): round(value, 2) for name, value in found.items() if "time" not in name}
    names = ("loss", "num_correct", "num_correct_greedy")
    return f"{seconds:.0f} seconds, " + ", ".join(f"{name} {told[name]}" for name in names if name in told)


def decode(model: PTPForCausalLM, prompt: torch.Tensor, tokens: int, **options: Any) -> tuple[float, Any]:
    """Seconds of processor time, and what was written."""
    started = time.process_time()
    out = model.generate(prompt, max_new_tokens=tokens, return_dict_in_generate=True, pad_token_id=0, **options)
    return time.process_time() - started, out


def row(model: PTPForCausalLM, prompts: torch.Tensor, tokens: int, options: dict[str, Any]) -> list[str]:
    """Tokens per call, and seconds of plain decoding over those with drafts, by turns."""
    seconds, calls, equal = [0.0, 0.0], 0, True
    for prompt in prompts:
        plain, expected = decode(model, prompt[None], tokens, **options, use_mtp=False)
        ours, out = decode(model, prompt[None], tokens, **options)
        seconds = [seconds[0] + plain, seconds[1] + ours]
        calls += out.speculation.backbone_calls
        equal &= torch.equal(expected.sequences, out.sequences)
    return [f"{len(prompts) * tokens / calls:.2f}", f"{seconds[0] / seconds[1]:.2f}", str(equal)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=4, help="N")
    parser.add_argument("--steps", type=int, default=2000, help="of the student, 8 rows each")
    parser.add_argument("--backbone-steps", type=int, default=400, help="of the backbone, 16 rows each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chain = MarkovChain(STATES, ALPHA, 0)
    config = LlamaConfig(
        vocab_size=STATES, hidden_size=arguments.width, intermediate_size=4 * arguments.width, initializer_range=0.1,
        num_hidden_layers=arguments.layers, num_attention_heads=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    backbone, data, held_out = LlamaForCausalLM(config), Texts(chain, 4096, 17), Texts(chain, 64, 18)
    how = dict(learning_rate=2e-3, per_device_train_batch_size=16)
    print("backbone:", train(Trainer, backbone, data, arguments.backbone_steps, held_out, **how))
    model = PTPForCausalLM.from_backbone(backbone, num_slots=arguments.slots)
    print("student:", train(PTPTrainer, model, data, arguments.steps, held_out))
    print("without dependence:", {name: round(best, 2) for name, best in ceilings(chain, arguments.slots).items()})
    prompts = chain.texts(arguments.prompts, 16, seed=10_000)
    table = Table("decoding", "tokens per call", "tokens/s over plain", "the same text")
    for name, options in MODES.items():
        table.add_row(name, *row(model, prompts, arguments.new_tokens, options))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
