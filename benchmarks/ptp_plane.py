"""Which pairs of tokens two uniforms pick: a picture of the plane, and the share of impossible pairs (PTP's Figure 5).

    python benchmarks/ptp_plane.py --minutes 1 --output plane.json --figure plane.png

On the chain of benchmarks/ptp_chain.py, behind every state, a grid of uniforms (u1, u2) picks two tokens: one after the
other, as the chain says; by independent prediction at its limit, the exact marginals; and by O-PTP, which learns for so
many minutes of processor time. A pair is impossible where no point of the grid gives it one after the other. Shares
are means over states, each as often as the chain is in it; the picture is of the state whose next token is least sure.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from ptp_chain import STATES, Student, Tables

from tokenahead.generation.tensors.sampling import pick
from tokenahead.training.utils import replace_file

NAMES = "one after the other", "independent", "O-PTP"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1, help="of processor time, for O-PTP")
    parser.add_argument("--grid", type=int, default=64, help="points of each uniform")
    parser.add_argument("--output", type=Path, default=Path("plane.json"))
    parser.add_argument("--figure", type=Path, help="picture of the planes behind one state")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.slots, arguments.concentration, arguments.contexts = 2, 1.0, 1
    tables = Tables(arguments, 0)
    rows, weights = tables.chain.rows, tables.chain.stationary
    student = tables.student("one_hot")
    points = (torch.arange(arguments.grid) + 0.5) / arguments.grid
    uniforms = torch.cartesian_prod(points, points)  # [grid ** 2, 2]
    contexts = torch.stack([(weights[:, None] * rows).argmax(0), torch.arange(STATES)], dim=1)  # the usual state before
    planes = torch.stack([planes_of(student, rows, context, uniforms) for context in contexts])  # [S, 3, grid ** 2]
    figures = {}
    for index, name in enumerate(NAMES):
        right = (planes[:, index] == planes[:, 0]).double().mean(1)
        known = torch.stack([torch.isin(found[index], found[0]) for found in planes]).double().mean(1)
        figures[name] = {"right": float(right @ weights), "impossible": float((1 - known) @ weights)}
    print(json.dumps(figures, indent=1))
    replace_file(arguments.output, json.dumps({"minutes": arguments.minutes, "pairs": figures}, indent=1))
    if arguments.figure:
        draw(planes[int(torch.special.entr(rows).sum(1).argmax())], arguments.grid, arguments.figure)


@torch.no_grad()
def planes_of(student: Student, rows: torch.Tensor, context: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the pairs of every point behind a context [2], each as a number, [3, grid ** 2]."""
    behind = rows[context[-1]]
    first = pick(uniforms[:, 0], behind.expand(len(uniforms), -1))
    second = pick(uniforms[:, 1], rows[first])
    alone = pick(uniforms[:, 1], (behind @ rows).expand(len(uniforms), -1))
    drafted = student.model(context.expand(len(uniforms), -1), uniforms=uniforms).logits[:, 2:].argmax(-1)
    return STATES * torch.stack([first, first, drafted[:, 0]]) + torch.stack([second, alone, drafted[:, 1]])


def draw(planes: torch.Tensor, grid: int, path: Path) -> None:
    """Draw a plane for each name: a colour for each pair, black where it is impossible."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    shades = torch.rand(STATES**2, generator=torch.Generator().manual_seed(0))
    for name, plane, axes in zip(NAMES, planes, figure.subplots(1, len(planes), sharey=True)):
        image = torch.from_numpy(colormaps["turbo"](shades[plane].numpy()))[:, :3]
        image[~torch.isin(plane, planes[0])] = 0
        axes.imshow(image.unflatten(0, (grid, grid)).transpose(0, 1).numpy(), origin="lower", extent=(0, 1, 0, 1))
        axes.set(title=name, xlabel="$u_1$")
    figure.axes[0].set_ylabel("$u_2$")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
