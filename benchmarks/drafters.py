"""Every drafter on one backbone and one text in one run: trained for the same time, then ranked.

    python benchmarks/byte_llama.py --minutes 6 --output demo-llama
    python benchmarks/drafters.py demo-llama --seconds 60 --output drafters.json
    python benchmarks/drafters.py demo-llama --only eagle1 hydra      # figures are added to the file

Heads and EAGLE heads learn from features of the frozen backbone that are kept on disk; modules, PTP and the small model
run whole models. Time of training is the processor's. Tokens per call are those of verifications, of greedy and of
sampled text (T = 1); they and the speed-ups are measured as by `tokenahead bench`.
Kernels, syncs and copies per cycle are counted on the processor (`cycles.py`). Drafts are chains as long as the
window of heads (`--draft`).
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from byte_llama import config_of, fit
from corpus import ByteWindows, Corpus, load_corpus
from cycles import per_cycle
from measuring import markdown, resumed
from studies import LENGTH, beginnings, benched, features_of, train
from transformers import LlamaForCausalLM

from tokenahead import (
    AssistantDrafter,
    DeepSeekMTP,
    EagleHead,
    EvaByteTokenizer,
    MTPHeads,
    NgramDrafter,
    PTPForCausalLM,
)
from tokenahead.training.evaluation import GREEDY, sampled
from tokenahead.training.evaluation.bench import results_of
from tokenahead.training.ptp.losses import PTPOptions
from tokenahead.training.ptp.trainer import PTPTrainer
from tokenahead.training.strategy import TrainingStrategy


def heads(kind: str, **options: Any) -> Callable[[Any, argparse.Namespace], Any]:
    """New heads of a family."""
    return lambda backbone, arguments: MTPHeads.from_backbone(
        backbone, window=arguments.draft + 1, head_type=kind, **options
    )


def eagle(version: int, objective: str | None = None, **options: Any) -> Callable[..., Any]:
    """A new EAGLE head."""

    def make(backbone: Any, arguments: argparse.Namespace) -> EagleHead:
        layers = backbone.config.num_hidden_layers
        given = {"aux_layers": [1, layers // 2, layers - 1]} if version == 3 else {}
        head = EagleHead.from_backbone(backbone, version=version, **given)
        head.loss_options.objective = objective
        for name, value in options.items():
            setattr(head.loss_options, name, value)
        return head

    return make


def modules(backbone: Any, arguments: argparse.Namespace) -> DeepSeekMTP:
    """One module, trained on its own output as longer drafts use it."""
    model = DeepSeekMTP.from_backbone(copy.deepcopy(backbone), num_modules=1)
    model.loss_options.unroll_steps = min(3, arguments.draft)
    return model


def slots(backbone: Any, arguments: argparse.Namespace) -> PTPForCausalLM:
    """A student that draws its drafts from distributions (C-PTP)."""
    return PTPForCausalLM.from_backbone(
        copy.deepcopy(backbone), "categorical", num_slots=arguments.draft, features="arithmetic", projection="mlp",
        lora_rank=32, lora_alpha=32,
    )  # fmt: skip


MAKERS: dict[str, tuple[Callable[..., Any], float]] = {
    "ff": (heads("ff"), 2e-3),
    "cp": (heads("cp", rank=8), 2e-3),
    "btree": (heads("btree", rank=8), 2e-3),
    "medusa": (heads("medusa"), 2e-3),
    "hydra": (heads("hydra"), 2e-3),
    "layer": (heads("layer"), 2e-3),
    "eagle1": (eagle(1), 2e-3),
    "hass": (eagle(1, "hass"), 2e-3),
    "eagle3": (eagle(3, steps=4), 2e-3),
    "eagle3, lk": (eagle(3, steps=4, divergence="lk"), 2e-3),
    "modules": (modules, 1e-3),
    "ptp": (slots, 3e-3),
}
UNTRAINED = ("n-gram", "small model")
ALWAYS = {"pad_token_id": 0, "return_dict_in_generate": True}


def measure(backbone: Any, options: dict[str, Any], prompts: list[str], new_tokens: int) -> dict[str, float]:
    """Greedy and sampled text of prompts, with drafts and without, by turns."""
    figures: dict[str, float] = {}
    model = options.pop("model", backbone)
    drafter = options.pop("assistant_model", None)
    bench = benched(model, drafter, prompts, (GREEDY, sampled(1.0)), new_tokens, **options)
    plain, method = bench.methods[:2]
    inputs = EvaByteTokenizer()(prompts[:1], return_tensors="pt")
    for row in (row for row in results_of(bench) if row.method == "drafts"):
        mode = "sampled" if row.do_sample else "greedy"
        how = {"do_sample": True, "top_k": 0} if row.do_sample else {"do_sample": False}
        ways = {"plain": plain.options, "drafts": method.options}
        counts = {kind: _counts(model, {**inputs, **how, **ALWAYS, **extra}) for kind, extra in ways.items()}
        figures[f"tokens per call, {mode}"] = row.tokens_per_verification or row.tokens_per_call
        figures[f"expected, {mode}"] = row.expected_tokens_per_call or math.nan
        figures[f"repeated, {mode}"] = row.repeated_share or 0.0
        figures[f"speed-up, {mode}"] = row.speed_up if row.claims_speed else math.nan
        figures[f"kernels per cycle over plain, {mode}"] = counts["drafts"]["kernels"] - counts["plain"]["kernels"]
        figures |= {f"{name} per cycle, {mode}": counts["drafts"][name] for name in ("syncs", "copies")}
    return figures


def _counts(model: Any, options: dict[str, Any]) -> dict[str, float]:
    """Kernels, syncs and copies per cycle."""

    def decode(new_tokens: int) -> Any:
        torch.manual_seed(0)
        return model.generate(**options, max_new_tokens=new_tokens)

    return per_cycle(decode)


def trained(name: str, backbone: Any, arguments: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """A drafter after its time, as options of `generate`, and what its training was."""
    torch.manual_seed(0)
    if name == "n-gram":
        return {"assistant_model": NgramDrafter().attach(backbone), "facts": {"parameters": 0}}
    if name == "small model":
        small = LlamaForCausalLM(config_of(64, 1))
        steps = fit(small, corpus.train, arguments.seconds)
        small.generation_config.eos_token_id = None
        facts = {"parameters": small.num_parameters(), "steps": steps}
        return {"assistant_model": AssistantDrafter(small).attach(backbone), "facts": facts}
    make, rate = MAKERS[name]
    drafter = make(backbone, arguments)
    owns = isinstance(drafter, (PTPForCausalLM, DeepSeekMTP))
    how: Any = TrainingStrategy()
    if isinstance(drafter, PTPForCausalLM):
        how = partial(PTPTrainer, options=PTPOptions(loss="kl", completions=64))
    started = time.process_time()
    if owns:
        data = ByteWindows(corpus.train, LENGTH)
    else:
        layers = drafter.learning_layers
        folder = arguments.output.with_suffix("") / f"features-{len(layers)}-{layers[0]}"
        data = features_of(drafter, corpus, arguments.rows, folder)
    trainer = train(drafter, how, data, arguments.seconds, rate)
    learned = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    facts = {"parameters": learned, "steps": trainer.state.global_step, "seconds": time.process_time() - started}
    return ({"model": drafter.eval()} if owns else {"assistant_model": drafter}) | {"facts": facts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbone", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="of processor time, for each drafter")
    parser.add_argument("--draft", type=int, default=5, help="tokens per draft")
    parser.add_argument("--rows", type=int, default=600, help="windows whose features are kept")
    parser.add_argument("--only", nargs="+", choices=[*UNTRAINED, *MAKERS], default=[*UNTRAINED, *MAKERS])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("drafters.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus(seed=0)

    def run(name: str) -> dict[str, Any]:
        backbone = LlamaForCausalLM.from_pretrained(arguments.backbone).eval()
        backbone.generation_config.eos_token_id = None
        options = trained(name, backbone, arguments, corpus)
        facts = options.pop("facts")
        prompts = beginnings(corpus, arguments.prompts, arguments.new_tokens)
        options |= {"num_assistant_tokens": arguments.draft}
        return facts | measure(backbone, options, prompts, arguments.new_tokens)

    table(resumed(arguments.output, arguments.only, run))


def table(results: dict[str, Any]) -> None:
    """The figures as a table in Markdown, the best first."""
    columns = ("drafter", "tokens per call, greedy / T = 1", "speed-up", "kernels over plain", "syncs", "copies")
    rows = []
    for name, row in sorted(results.items(), key=lambda item: -item[1]["tokens per call, greedy"]):
        cells = [_pair(row, what, digits) for what, digits in _SHOWN.items()]
        rows.append([name, *cells, f"{row['parameters'] / 1e6:.2f} M", str(row.get("steps", 0))])
    print(markdown((*columns, "parameters", "steps"), rows), end="")


_SHOWN = {"tokens per call": 2, "speed-up": 2, "kernels per cycle over plain": 0, "syncs per cycle": 2,
          "copies per cycle": 2}  # fmt: skip


def _pair(row: dict[str, Any], what: str, digits: int) -> str:
    return " / ".join(f"{row[f'{what}, {mode}']:.{digits}f}" for mode in ("greedy", "sampled"))


if __name__ == "__main__":
    main()
