"""Which pairs of tokens two uniforms pick, and how many of them hardly ever follow each other (PTP's Figure 5).

    python benchmarks/byte_llama.py --minutes 5 --output demo-llama
    python benchmarks/ptp_plane.py --seeds 0 1 2 --text demo-llama --output plane.json --figure plane.png

Behind every context a grid of uniforms (u1, u2) picks two tokens: one after the other, as the source says; by
independent prediction at its limit, the exact marginals; and by O-PTP, after so many minutes of processor time. A pair
(a, b) is right where it is what is picked one after the other, and unlikely where p(b | a) < 1e-3, whatever the grid.
The source is a chain of 25 states, another one for each seed, whose contexts count as often as the chain is in them;
and with `--text` a byte Llama behind beginnings of held-out code, by a fourth of the points each way. The picture is of
the first chain, behind the state whose next token is least sure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from corpus import ByteWindows, load_corpus
from measuring import llama
from studies import BEGUN, LENGTH, held_out_rows, train
from torch import Tensor, nn
from torch.distributions import Dirichlet
from transformers import DynamicCache, LlamaForCausalLM

from tokenahead import PTPForCausalLM
from tokenahead.generation.tensors.sampling import draw, pick
from tokenahead.training import PTPTrainer
from tokenahead.training.utils import replace_file

STATES, ALPHA, ROW = 25, 0.3, 12
"""Of a chain: V, how peaked its rows are, and tokens of a row to learn from."""
UNLIKELY = 1e-3
NAMES = "one after the other", "independent", "O-PTP"
Source = tuple[Tensor, Tensor, Tensor, Tensor, Any]
"""Contexts [C, T], their weights [C], p(a) [C, V] and p(b | a) [C, V, V] behind them, and a student that learned."""


class Chain(nn.Module):
    """A Markov chain with rows of Dirichlet(0.3), which is its own exact teacher."""

    def __init__(self) -> None:
        super().__init__()
        rows = Dirichlet(torch.full((STATES,), ALPHA, dtype=torch.float64)).sample((STATES,))
        self.rows = nn.Parameter(rows, requires_grad=False)  # [V, V]

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.rows[input_ids].log())


def of_chain(seed: int, seconds: float) -> Source:
    """Return a chain behind every state, with its usual state before; the student learns all its weights."""
    torch.manual_seed(seed)
    chain = Chain()
    rows = chain.rows.data
    weights = torch.linalg.matrix_power(rows, 4096)[0]  # how often the chain is in each state
    columns = [draw(weights.expand(16_384, -1))]
    while len(columns) < ROW:
        columns.append(draw(rows[columns[-1]]))
    data = [{"input_ids": row, "labels": row} for row in torch.stack(columns, dim=1)]
    backbone = llama(96, 4, STATES, intermediate_size=256, num_attention_heads=4, initializer_range=0.1)
    model = PTPForCausalLM.from_backbone(backbone, num_slots=2, lora_rank=4)
    model.train_only("all")
    train(model, partial(PTPTrainer, teacher=chain), data, seconds, rate=1e-3, seed=seed, rows=16)
    contexts = torch.stack([(weights[:, None] * rows).argmax(0), torch.arange(STATES)], dim=1)
    return contexts, weights, rows, rows.expand(STATES, -1, -1), model.cpu()


def of_text(folder: Path, count: int, seed: int, seconds: float) -> Source:
    """Return a byte Llama behind held-out beginnings; the student learns adapters alone."""
    backbone: Any = LlamaForCausalLM.from_pretrained(folder).eval()
    corpus, tokens, behind = load_corpus(), torch.arange(backbone.config.vocab_size), list[tuple[Tensor, Tensor]]()
    contexts = held_out_rows(corpus, count)[:, :BEGUN]
    for context in contexts:
        with torch.no_grad():
            first = backbone(context[None], past_key_values=(cache := DynamicCache())).logits[0, -1]
            cache.batch_repeat_interleave(len(tokens))
            second = backbone(tokens[:, None], past_key_values=cache).logits[:, -1]
        behind.append((first.double().softmax(-1), second.double().softmax(-1)))
    torch.manual_seed(seed)
    model = PTPForCausalLM.from_backbone(backbone, num_slots=2)
    train(model, PTPTrainer, ByteWindows(corpus.train, LENGTH), seconds, rate=2e-3, seed=seed)
    return contexts, torch.ones(count).double() / count, *map(torch.stack, zip(*behind)), model.cpu()


@torch.no_grad()
def planes_of(source: Source, grid: int) -> tuple[Tensor, Tensor]:
    """Return the pairs [C, 3, grid ** 2, 2] that uniforms pick behind contexts, by name, and which are unlikely."""
    points, planes = (torch.arange(grid) + 0.5) / grid, []
    u, (contexts, _, first, second, student) = torch.cartesian_prod(points, points), source
    for context, behind, after in zip(contexts, first, second):
        a = pick(u[:, 0], behind.expand(len(u), -1))
        b, alone = (pick(u[:, 1], each) for each in (after[a], (behind @ after).expand(len(u), -1)))
        drafted = student(context.expand(len(u), -1), uniforms=u, logits_to_keep=2).logits.argmax(-1)
        planes.append(torch.stack([torch.stack([a, b], 1), torch.stack([a, alone], 1), drafted]))
    pairs = torch.stack(planes)
    return pairs, second[torch.arange(len(pairs))[:, None, None], pairs[..., 0], pairs[..., 1]] < UNLIKELY


def draw_planes(pairs: Tensor, unlikely: Tensor, path: Path) -> None:
    """Draw a plane for each name: a colour for each of the pairs [3, points, 2], black where it is unlikely."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure, grid = Figure(figsize=(10.5, 4.2), layout="constrained"), round(pairs.shape[1] ** 0.5)
    shades = torch.rand(STATES, STATES, generator=torch.Generator().manual_seed(0))
    for name, plane, is_black, axes in zip(NAMES, pairs, unlikely, figure.subplots(1, len(NAMES), sharey=True)):
        image = torch.from_numpy(colormaps["turbo"](shades[plane[:, 0], plane[:, 1]].numpy()))[:, :3]
        image[is_black] = 0
        axes.imshow(image.unflatten(0, (grid, grid)).transpose(0, 1).numpy(), origin="lower", extent=(0, 1, 0, 1))
        axes.set(title=name, xlabel="$u_1$", ylabel="$u_2$")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1, help="of processor time, for O-PTP")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--text", type=Path, help="directory of a byte Llama")
    parser.add_argument("--contexts", type=int, default=64, help="of the text")
    parser.add_argument("--grid", type=int, default=64, help="points of each uniform")
    parser.add_argument("--output", type=Path, default=Path("plane.json"))
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    makers: dict[str, Callable[[int, float], Source]] = {"chain": of_chain}
    makers |= {"text": partial(of_text, asked.text, asked.contexts)} if asked.text else {}
    found = []
    for name, seed in product(makers, asked.seeds):
        source = makers[name](seed, 60 * asked.minutes)
        pairs, unlikely = planes_of(source, asked.grid if name == "chain" else asked.grid // 4)
        shares = torch.stack([(pairs == pairs[:, :1]).all(-1), unlikely], -1).double().mean(2)  # [C, 3, 2]
        means = torch.tensordot(source[1], shares, dims=1).tolist()
        rows = {kind: dict(zip(("right", "unlikely"), row)) for kind, row in zip(NAMES, means)}
        found.append({"source": name, "seed": seed, "minutes": asked.minutes, "pairs": rows})
        print(json.dumps(found[-1]), flush=True)
        if asked.figure and len(found) == 1:
            least_sure = int(torch.special.entr(source[2]).sum(-1).argmax())
            draw_planes(pairs[least_sure], unlikely[least_sure], asked.figure)
    replace_file(asked.output, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
