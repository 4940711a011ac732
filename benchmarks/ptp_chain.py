"""Parallel token prediction on chains as hard to tell as the taxi data of its paper: perplexity 19.8 of 25 states, N = 16.

    python benchmarks/ptp_chain.py --seeds 0 1 2 --output ptp_chain.json

A small Llama learns a chain (another one for each seed) token by token, and students that start from it, all their
weights, learn slots for equal processor time, with the chain itself as their teacher. Counted are the drafted tokens, of
16, that are right before the first wrong one (Eq. 16): coupled, with the uniforms that drafted them, and by block where
drafts have distributions. C-PTP's first token is the chain's own; independent prediction is that at its limit, exact.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measuring import llama, resumed
from ptp_plane import STATES, Chain
from studies import train
from torch.nn.functional import pad
from transformers import Trainer

from tokenahead import PTPForCausalLM
from tokenahead.generation.tensors.sampling import pick
from tokenahead.generation.verification import coupled_acceptance, verify
from tokenahead.training import PTPOptions, PTPTrainer

SLOTS, CONTEXT, ROW, ALPHA = 16, 2, 24, 1.95
"""N, tokens of a context, tokens of a row to learn from, and how even the chains are."""
STUDENTS: dict[str, dict[str, Any]] = {
    "independent": {},
    "O-PTP": {},
    "C-PTP": {"variant": "categorical"},
    "O-PTP, 66k": {"layers": 4, "width": 32},
    "O-PTP, 4k": {"layers": 1, "width": 16},
    "O-PTP, new weights": {"first": 0},
    "O-PTP, arbitrary text": {"text": "arbitrary"},
    "O-PTP, its own text": {"sequences": "student"},
}


def student(
    chain: Chain, seed: int, seconds: float, layers: int = 2, width: int = 128, first: float = 60,
    variant: str = "one_hot", text: str = "chain", sequences: str = "dataset",
) -> tuple[Any, int]:  # fmt: skip
    """Return a student whose backbone learned for so many seconds first, and the steps of the student itself."""
    backbone = llama(width, layers, STATES, intermediate_size=4 * width, initializer_range=0.1)
    rows = chain.texts(65_536, ROW)
    data = [{"input_ids": row, "labels": row} for row in rows]
    if first:
        train(backbone, Trainer, data, first, rate=2e-3, seed=seed, rows=64)
    if text == "arbitrary":
        data = [{"input_ids": row, "labels": row} for row in torch.randint(STATES, rows.shape)]
    options = PTPOptions(sequences=sequences, completions=4, greedy_share=0)
    slots = SLOTS - (variant == "categorical")
    model = PTPForCausalLM.from_backbone(backbone, variant, num_slots=slots, lora_rank=4)
    model.train_only("all")
    make = partial(PTPTrainer, options=options, teacher=chain)
    return model, train(model, make, data, seconds, rate=1e-3, seed=seed, rows=16).state.global_step


@torch.no_grad()
def right_tokens(model: Any, chain: Chain, contexts: torch.Tensor) -> dict[str, float]:
    """Return how many drafted tokens are right before the first wrong one, by verification; without a model those of
    exact marginals."""
    uniforms, last, q = torch.rand(len(contexts), SLOTS), contexts[:, -1:], None
    if model is None:
        q = torch.stack([torch.linalg.matrix_power(chain.rows, k + 1)[last[:, 0]] for k in range(SLOTS)], dim=1)
    elif model.config.variant == "categorical":
        behind = model(contexts, uniforms=uniforms[:, :-1]).logits[:, CONTEXT:].double().softmax(-1)
        q = torch.cat([chain.rows[last], behind], dim=1)
    tokens = model(contexts, uniforms=uniforms).logits[:, CONTEXT:].argmax(-1) if q is None else pick(uniforms, q)
    p = chain.rows[torch.cat([last, tokens], dim=1)]  # [B, N + 1, V]
    found = {"coupled": coupled_acceptance(tokens, pad(uniforms, (0, 1)), p)[0]}
    found |= {} if q is None else {"block": verify(tokens, q, p, "block")[0]}
    return {rule: round(float(counts.double().mean()), 4) for rule, counts in found.items()}


def measure(name: str, minutes: float) -> dict[str, float]:
    """Train and measure a student of a chain."""
    kind, seed = name.split("; ")
    torch.manual_seed(int(seed))
    chain = Chain(ALPHA)
    entropy = chain.weights @ torch.special.entr(chain.rows.data).sum(-1)
    model, steps = None, 0
    if kind != "independent":
        model, steps = student(chain, int(seed), 60 * minutes, **STUDENTS[kind])
    found = right_tokens(model, chain, chain.texts(16_384, CONTEXT))
    return {"steps": steps, "minutes": minutes, "perplexity": round(float(entropy.exp()), 2)} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3, help="of processor time for each student")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--students", nargs="+", default=list(STUDENTS), choices=STUDENTS)
    parser.add_argument("--output", type=Path, default=Path("ptp_chain.json"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"{kind}; {seed}" for kind, seed in product(asked.students, asked.seeds)]
    resumed(asked.output, names, partial(measure, minutes=asked.minutes))


if __name__ == "__main__":
    main()
