"""Sequential modules: our `generate` beside transformers' own `use_mtp`, in one run.

    python benchmarks/modules.py                          # the trained golden (D = 2), and a D = 1 model trained here
    python benchmarks/modules.py --minutes 3 --calls 20 --new-tokens 64 --sampled

The D = 1 model is a small DeepSeek-V3 that learns the Python standard library's source, byte by byte, for
`--minutes`. transformers finds module weights only under the layer numbers of the released checkpoints; its pattern is
patched to this model's. It reads the modules from disk in every call. The table is that of `tokenahead bench`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from corpus import ByteWindows, load_corpus
from rich.console import Console
from rich.progress import Progress
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel

from tokenahead import DeepSeekMTP, __version__
from tokenahead.model_cards import MeasuredResults
from tokenahead.training.evaluation import GREEDY, sampled
from tokenahead.training.evaluation.bench import Bench, Protocol
from tokenahead.training.evaluation.decoding import Method
from tokenahead.training.evaluation.methods import drafting_method, plain_method
from tokenahead.training.evaluation.prompts import Prompt, PromptEncoder
from tokenahead.training.evaluation.summary import results_of
from tokenahead.training.evaluation.table import tables

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "deepseek_mtp" / "dsv3_d2_trained"


def small_config() -> DeepseekV3Config:
    """A DeepSeek-V3 over bytes: dense layers, one module with experts."""
    return DeepseekV3Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        n_routed_experts=16,
        moe_intermediate_size=256,
        num_nextn_predict_layers=1,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )


def train(folder: str, minutes: float, unroll: int) -> torch.Tensor:
    """Trains and saves the D = 1 model, also on its module's own output; returns held-out bytes [N, 64] as prompts."""
    torch.manual_seed(0)
    corpus = load_corpus(seed=0)
    data = ByteWindows(corpus.train, 129)
    model = DeepSeekMTP(small_config()).train()
    model.loss_options.unroll_steps = unroll
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    start, budget = time.monotonic(), 60 * minutes
    with Progress() as progress:
        task = progress.add_task("training", total=budget)
        while (elapsed := time.monotonic() - start) < budget:
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1, 20 * elapsed / budget + 0.05) * (1 - 0.95 * elapsed / budget)
            rows = torch.stack([data[int(i)]["input_ids"] for i in torch.randint(len(data), (16,))])
            loss = model(rows, labels=rows).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(task, completed=elapsed, description=f"training, loss {loss.item():.2f}")
    model.eval().save_pretrained(folder)
    held_out = ByteWindows(corpus.held_out, 64)
    return torch.stack([held_out[int(i)]["input_ids"] for i in torch.linspace(0, len(held_out) - 1, 20).long()])


@dataclass(frozen=True)
class Ids(PromptEncoder):
    """Prompts whose turn is a list of ids."""

    def batch(self, group: Sequence[Prompt], answers: Sequence[Sequence[str]], device: Any) -> dict[str, torch.Tensor]:
        """The ids, which are equally many."""
        ids = torch.tensor([json.loads(prompt.turns[0]) for prompt in group], device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def answer(self, ids: Sequence[int]) -> str:
        """Nothing: there are no second turns."""
        return ""


def plain_classes(depth: int, layers: int) -> Callable[[str | Path], PreTrainedModel]:
    """transformers' own model, told where the modules of this checkpoint are."""

    def load(folder: str | Path) -> PreTrainedModel:
        model_class = type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)))
        numbers = "|".join(str(layers + k) for k in range(depth))
        model_class._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({numbers}).*"]
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    return load


def compare(folder: str | Path, prompts: torch.Tensor, arguments: argparse.Namespace) -> None:
    """All ways of decoding one checkpoint, by turns, so that a change of load meets all of them."""
    ours = DeepSeekMTP.from_pretrained(folder, dtype=torch.float32).eval()
    depth, layers = ours.num_modules, ours.config.num_hidden_layers
    theirs = plain_classes(depth, layers)(folder)
    for model in (ours, theirs):
        model.generation_config.eos_token_id = None
    methods = [plain_method(theirs), Method("use_mtp of transformers", theirs, {"use_mtp": True})]
    for drafts in sorted({depth, 2, 3, 4}):
        methods.append(drafting_method(f"{drafts} drafts", ours, num_assistant_tokens=drafts))
    protocol = Protocol([sampled(1.0) if arguments.sampled else GREEDY], new_tokens=arguments.new_tokens)
    bench = Bench(methods, Ids(cast(Any, None)), protocol)
    rows = [prompts[call % len(prompts)].tolist() for call in range(arguments.calls)]
    bench.run([Prompt(str(number), (json.dumps(ids),)) for number, ids in enumerate(rows)])
    words = dict.fromkeys(("dataset_name", "dataset_description", "hardware", "dtype", "command"), f"D = {depth}")
    measured = MeasuredResults(results=results_of(bench), library_version=__version__, **words)
    for table in tables(measured):
        Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="training time of the D = 1 model")
    parser.add_argument("--unroll", type=int, default=3, help="steps that its module is trained on its own output")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sampled", action="store_true", help="draw at T = 1 instead of greedy decoding")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compare(GOLDEN, torch.randint(1, 128, (20, 12)), arguments)
    with tempfile.TemporaryDirectory() as folder:
        prompts = train(folder, arguments.minutes, arguments.unroll)
        compare(folder, prompts, arguments)


if __name__ == "__main__":
    main()
