"""Does an MTP loss make the model itself better? Paths in star graphs, which next-token training does not find.

    for arms in 2 3; do
      python benchmarks/star_graph.py --arms $arms --length 4 --names 10 --layers 4 --width 64 --batch 128 \\
        --steps 2000 --every 100 --tests 256 --seeds 0 1 2 --output stars/$arms
    done
    python benchmarks/star_graph.py --table --output stars/2  # joins their files in stars/2.json

G(arms, length) of Bachmann & Nagarajan (2024, arXiv 2403.06963): paths of `length` nodes leave one centre. A row has
all edges in random order, the centre and the end of one arm, and then that arm. Only the first step is hard: it needs
the whole way back from the end. Next-token training learns the later steps from the true ones before them, and guesses
the first among the arms. A small Llama starts from random weights; rows are drawn for every step, and none is seen
twice.

- `next-token`: cross-entropy of the arm's tokens
- `mtp`: the same and, jointly, heads for a window as long as the arm (`JointMTPModel`), which are then dropped; windows
  also begin in the prompt
- `mutor`: the same and registers that predict up to as far ahead (`RegisterModel`), which are then dropped

A figure is the share of held-out graphs whose whole path the model alone writes, greedily. A run ends early once it
writes nearly all of them. Each run has a file, written after every evaluation; runs that ended are not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import llama_config, markdown
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from tokenahead import MTPHeads
from tokenahead.experimental.mutor import RegisterModel
from tokenahead.modeling.heads.joint import JointMTPModel
from tokenahead.modeling.heads.losses import IGNORE
from tokenahead.training.utils import replace_file

REGISTERS = 0.3
"""Weight of the registers' loss, as in MuToR's paper."""
WARMUP = 100
"""Steps in which learning rates rise."""
SOLVED = 0.995
"""Share of paths at which a run ends."""


@dataclass(frozen=True)
class Stars:
    """Graphs G(arms, length) whose nodes have some of `names` names."""

    arms: int
    length: int
    names: int

    @property
    def steps(self) -> int:
        """Tokens of a path behind its centre."""
        return self.length - 1

    @property
    def prompt(self) -> int:
        """Tokens before the path: edges, centre, end, and one that asks."""
        return 2 * self.arms * self.steps + 3

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return rows [count, prompt + steps]."""

        def shuffled(size: int) -> Tensor:
            return torch.rand(count, size, device=generator.device, generator=generator).argsort(1)

        nodes = shuffled(self.names)[:, : 1 + self.arms * self.steps]
        centre, arms = nodes[:, :1], nodes[:, 1:].unflatten(1, (self.arms, self.steps))
        before = torch.cat([centre[:, None].expand(-1, self.arms, 1), arms[..., :-1]], dim=-1)
        edges = torch.stack([before, arms], dim=-1).flatten(1, 2)  # [count, edges, 2]
        edges = edges.gather(1, shuffled(edges.shape[1])[..., None].expand_as(edges))
        path, asks = arms[:, 0], torch.full_like(centre, self.names)
        return torch.cat([edges.flatten(1), centre, path[:, -1:], asks, path], dim=1)

    def labels(self, rows: Tensor) -> Tensor:
        """Return rows with only the path as targets."""
        return rows.masked_fill(torch.arange(rows.shape[1], device=rows.device) < self.prompt, IGNORE)


Loss = Callable[[Tensor], Tensor]


def next_token(model: Any, stars: Stars) -> tuple[nn.Module, Loss]:
    """Plain training."""
    return model, lambda rows: model(rows, labels=stars.labels(rows)).loss


def mtp(model: Any, stars: Stars) -> tuple[nn.Module, Loss]:
    """Heads for the whole path, and the backbone, jointly."""
    joint: Any = JointMTPModel(MTPHeads.from_backbone(model, stars.steps, head_type="ff", unembedding="own"))
    return joint, lambda rows: joint(rows, labels=stars.labels(rows)).loss


def mutor(model: Any, stars: Stars) -> tuple[nn.Module, Loss]:
    """A register before every token of the path; those of a row all look equally far ahead, up to the whole path."""
    registers = RegisterModel(model)

    def loss(rows: Tensor) -> Tensor:
        return register_loss(registers, stars, rows, torch.randint(1, stars.length, rows.shape[:1], device=rows.device))

    return registers, loss


def register_loss(registers: RegisterModel, stars: Stars, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return MuToR's loss of rows whose registers look so far ahead, [count]."""
    (count, length), given = rows.shape, stars.prompt
    columns = torch.arange(length, device=rows.device).expand(count, -1)
    starts = columns[:, given:]
    ahead = starts + offsets[:, None] - 1
    far = rows.gather(1, ahead.clamp(max=length - 1)).masked_fill(ahead >= length, IGNORE)
    logits = registers(rows, torch.ones_like(rows), columns, starts, offsets)
    parts = (logits[:, given - 1 : length - 1], rows[:, given:]), (logits[:, length:], far)
    own, behind = (F.cross_entropy(part.flatten(0, 1).float(), wanted.flatten()) for part, wanted in parts)
    return (1 - REGISTERS) * own + REGISTERS * behind


METHODS = {"next-token": next_token, "mtp": mtp, "mutor": mutor}


def optimizers_of(model: Any, learner: nn.Module, matrix_rate: float, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the model's layers, and AdamW for all else."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    theirs = set(matrices)
    others = [weight for weight in learner.parameters() if weight not in theirs]
    muon = torch.optim.Muon(matrices, matrix_rate, weight_decay=0.0)
    return [muon, torch.optim.AdamW(others, rate, betas=(0.9, 0.95), weight_decay=0.0)]


@torch.no_grad()
def solved(model: Any, stars: Stars, rows: Tensor) -> float:
    """Return the share of rows whose path the model alone writes."""
    written = rows[:, : stars.prompt]
    for _ in range(stars.steps):
        written = torch.cat([written, model(written).logits[:, -1:].argmax(-1)], dim=1)
    return float((written == rows).all(1).float().mean())


def run(arguments: argparse.Namespace, stars: Stars, method: str, seed: int, path: Path) -> None:
    """Train one model, and write the share of paths that it finds every so many steps."""
    device = torch.device(arguments.device)
    torch.manual_seed(seed)
    config = llama_config(arguments.width, arguments.layers, stars.names + 1, max_position_embeddings=512)
    model = LlamaForCausalLM(config).to(device)
    learner, loss_of = METHODS[method](model, stars)
    learner.to(device).train()
    generator, held_out = (torch.Generator(device).manual_seed(seed + extra) for extra in (1000, 2000))
    tests = stars.draw(arguments.tests, held_out)
    optimizers = optimizers_of(model, learner, *arguments.rates)
    found: dict[str, Any] = {"method": method, "seed": seed, "graph": asdict(stars), "done": False, "curve": []}
    found |= {name: getattr(arguments, name) for name in ("width", "layers", "batch", "rates", "device")}
    started = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(stars.draw(arguments.batch, generator))
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, arguments.rates):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, step / WARMUP)
            with patch.object(Tensor, "bfloat16", Tensor.float):  # which Muon takes, and most processors emulate
                optimizer.step()
            optimizer.zero_grad()
        late = time.perf_counter() - started > arguments.seconds
        if step % arguments.every and step < arguments.steps and not late:
            continue
        learner.eval()
        share = solved(model, stars, tests)
        learner.train()
        found["done"] = late or step == arguments.steps or share >= SOLVED
        found["curve"].append([step, share, loss.item()])
        found["seconds"] = time.perf_counter() - started
        replace_file(path, json.dumps(found))
        print(method, seed, step, f"{share:.3f} {loss.item():.3f} {found['seconds']:.0f} s", flush=True)
        if found["done"]:
            break


def table(runs: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of shares of paths after so many steps; runs that found nearly all keep their last."""
    steps = sorted({step for each in runs for step, *_ in each["curve"]})
    columns = [steps[round(share * (len(steps) - 1))] for share in (0.1, 0.25, 0.5, 0.75, 1)]
    rows = []
    for each in sorted(runs, key=lambda each: (list(METHODS).index(each["method"]), each["seed"])):
        last, share, _ = each["curve"][-1]
        known = [column for column in columns if column <= last or share >= SOLVED]
        shares = [next((s for step, s, _ in reversed(each["curve"]) if step <= column), None) for column in known]
        cells = ["-" if share is None else f"{share:.2f}" for share in shares] + ["-"] * (len(columns) - len(known))
        rows.append([each["method"], str(each["seed"]), *cells])
    return ["loss", "seed", *(f"{column} steps" for column in columns)], rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", type=int, default=5)
    parser.add_argument("--length", type=int, default=5, help="nodes of a path, with the centre")
    parser.add_argument("--names", type=int, default=50, help="of nodes")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rates", type=float, nargs=2, default=[0.02, 2e-3], help="of Muon, and of AdamW")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which a run ends")
    parser.add_argument("--every", type=int, default=200, help="steps between evaluations")
    parser.add_argument("--tests", type=int, default=1024, help="held-out graphs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs=2, metavar=("METHOD", "SEED"), help="one run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, default=Path("star-graph"))
    arguments = parser.parse_args()
    stars = Stars(arguments.arms, arguments.length, arguments.names)
    asked = [(arguments.only[0], int(arguments.only[1]))] if arguments.only else product(METHODS, arguments.seeds)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for method, seed in () if arguments.table else asked:
        path = arguments.output / f"{method}-{seed}.json"
        if not (path.exists() and json.loads(path.read_text(encoding="utf-8"))["done"]):
            run(arguments, stars, method, seed, path)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(arguments.output.glob("*.json"))]
    replace_file(arguments.output.with_suffix(".json"), json.dumps(runs))
    print(markdown(*table(runs)), end="")


if __name__ == "__main__":
    main()
