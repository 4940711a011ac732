"""Sequential modules: our `generate` beside transformers' own `use_mtp`, in one run.

    python benchmarks/modules.py                          # the trained golden (D = 2), and a D = 1 model trained here
    python benchmarks/modules.py --minutes 3 --calls 20 --new-tokens 64 --sampled

The D = 1 model is a small DeepSeek-V3 that learns the Python standard library's source, byte by byte, for
`--minutes`. transformers finds module weights only under the layer numbers of the released checkpoints; its pattern is
patched to this model's. It reads the modules from disk in every call; `reads` counts the opened safetensors files.
Speeds are ratios to plain decoding and to `use_mtp`; of text that repeats more than half of itself, none is shown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from corpus import ByteWindows, load_corpus
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel, modeling_layers

from tokenahead import DeepSeekMTP
from tokenahead.training.evaluation import repeated_share
from tokenahead.training.results import DEGENERATE_SHARE

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


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[dict[str, int]]:
    """Counts forwards of a model and safetensors files that transformers opens."""
    counts = {"forwards": 0, "reads": 0}
    opener = modeling_layers.safe_open

    def count_forward(*_: object) -> None:
        counts["forwards"] += 1

    def count_read(*args: object, **kwargs: object) -> object:
        counts["reads"] += 1
        return opener(*args, **kwargs)

    hook = model.register_forward_hook(count_forward)
    modeling_layers.safe_open = count_read
    try:
        yield counts
    finally:
        hook.remove()
        modeling_layers.safe_open = opener


@dataclass
class Way:
    """One way of decoding, and what its calls of `generate` took."""

    name: str
    model: PreTrainedModel
    main: PreTrainedModel
    options: dict[str, object]
    forwards: int = 0
    reads: int = 0
    times: list[float] = field(default_factory=list)
    texts: list[torch.Tensor] = field(default_factory=list)

    def call(self, prompt: torch.Tensor, new_tokens: int) -> None:
        """One call of `generate`."""
        options = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0} | self.options
        with counted(self.main) as counts:
            start = time.perf_counter()
            self.texts.append(self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options))
            self.times.append(time.perf_counter() - start)
        self.forwards, self.reads = self.forwards + counts["forwards"], self.reads + counts["reads"]

    def forget(self) -> None:
        """Starts the count again."""
        self.forwards, self.reads, self.times, self.texts = 0, 0, [], []


def plain_classes(depth: int, layers: int) -> Callable[[str | Path], PreTrainedModel]:
    """transformers' own model, told where the modules of this checkpoint are."""

    def load(folder: str | Path) -> PreTrainedModel:
        model_class = type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)))
        numbers = "|".join(str(layers + k) for k in range(depth))
        model_class._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({numbers}).*"]
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    return load


def compare(folder: str | Path, prompts: torch.Tensor, arguments: argparse.Namespace) -> Table:
    """All ways of decoding one checkpoint, by turns, so that a change of load meets all of them."""
    ours = DeepSeekMTP.from_pretrained(folder, dtype=torch.float32).eval()
    depth, layers = ours.num_modules, ours.config.num_hidden_layers
    theirs = plain_classes(depth, layers)(folder)
    for model in (ours, theirs):
        model.generation_config.eos_token_id = None
    ways = [
        Way("plain (transformers)", theirs, theirs, {}),
        Way("use_mtp (transformers)", theirs, theirs, {"use_mtp": True}),
    ]
    for drafts in sorted({depth, 2, 3, 4}):
        ways.append(Way(f"tokenahead, {drafts} drafts", ours, ours.main.base_model, {"num_assistant_tokens": drafts}))
    for way in ways:
        way.options |= {"do_sample": True, "top_k": 0} if arguments.sampled else {}
        way.call(prompts[0][None], 16)
        way.forget()
    for call in range(arguments.calls):
        for way in ways:
            way.call(prompts[call % len(prompts)][None], arguments.new_tokens)
    table = Table(title=f"D = {depth}, {arguments.calls} calls of {arguments.new_tokens} tokens, by turns")
    columns = ("decoding", "tokens per forward", "repeated", "of plain", "of use_mtp", "reads per call", "identical")
    for column in columns:
        table.add_column(column, justify="right")
    for way in ways:
        table.add_row(*row(way, ways, arguments.new_tokens))
    return table


def row(way: Way, ways: list[Way], new_tokens: int) -> list[str]:
    """Cells of the table."""
    calls = len(way.times)
    repeated = statistics.mean(repeated_share(text[0, -new_tokens:].tolist()) for text in way.texts)
    ratios = (statistics.median(a / b for a, b in zip(other.times, way.times)) for other in ways[:2])
    shown = [f"{ratio:.2f}" if repeated <= DEGENERATE_SHARE else "none claimed" for ratio in ratios]
    return [
        way.name,
        f"{new_tokens * calls / way.forwards:.2f}",
        f"{repeated:.0%}",
        *shown,
        f"{way.reads / calls:.0f}",
        "drawn" if way.options.get("do_sample") else "yes" if all(map(torch.equal, way.texts, ways[0].texts)) else "NO",
    ]


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
    console = Console(width=120)
    console.print(compare(GOLDEN, torch.randint(1, 128, (20, 12)), arguments))
    with tempfile.TemporaryDirectory() as folder:
        prompts = train(folder, arguments.minutes, arguments.unroll)
        console.print(compare(folder, prompts, arguments))


if __name__ == "__main__":
    main()
