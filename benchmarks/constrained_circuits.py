"""Drafts of circuits under a constraint: every token masked alone, or weighed by what the circuit says of the rest.

    python benchmarks/constrained_circuits.py             # v = 5, n = 4: laws and acceptance against enumeration
    git archive 6343973e~1 model_cards/box | tar -x -C OLD          # heads whose leaves read no byte before them
    python benchmarks/constrained_circuits.py --box OLD/model_cards/box --out docs/results/constrained_circuits.json

F(j, e) is the circuit's probability of the tokens x_1 .. x_j, followed by any that the automaton allows at j + 1 .. e:
a sum over latent states times automaton states. A look-ahead of h tokens drafts, in a window of n,

    q_h(x_j | x_1 .. x_{j-1})  =  F(j, e) / F(j - 1, e),    e = min(j + h, n).

h = 0 masks every token alone, as `generate` does; h = n conditions on the whole window. The target is masked token by
token. Tokens per call are expected along texts that it has drawn, at T = 1, by block verification of drafts of 7; gains
are ratios of expected calls to those of h = 0 for the same texts, with the standard error over these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import show
from torch import Tensor

from tokenahead.extending import TableAutomaton
from tokenahead.modeling.circuits import circuit_from_logits
from tokenahead.modeling.common.teacher import accepted_along
from tokenahead.modeling.heads.circuits import ChainDistribution, LatentDistribution, TreeDistribution
from tokenahead.training.box import load_box
from tokenahead.training.evaluation.drafts import ExpectedCalls, ratio_of_sums, text_of
from tokenahead.training.utils import replace_file

DRAFTS, HORIZONS, BEGUN = 7, (0, 1, 3, 7), 96
EVER = 10**6


class Repeat(NamedTuple):
    """A pattern that comes so many times."""

    pattern: tuple[Any, ...]
    least: int
    most: int


class Either(NamedTuple):
    """One of several patterns."""

    patterns: tuple[Any, ...]


DIGIT, LETTER = frozenset(b"0123456789"), frozenset(b"abcdefghijklmnopqrstuvwxyz_")
"""Patterns are tuples of sets of bytes, `Repeat` and `Either`."""


def word(text: str) -> tuple[Any, ...]:
    """Return the pattern of one text."""
    return tuple(frozenset([byte]) for byte in text.encode())


NAME, COUNT = Repeat((LETTER,), 1, 12), Either((word("0"), (DIGIT - {48}, Repeat((DIGIT,), 0, 3))))
KIND = Either((word("class"), word("function"), word("method")))
RECORD = (*word('{"name": "'), NAME, *word('", "lines": '), COUNT, *word(', "kind": "'), KIND, *word('"}, '))
CONSTRAINTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "numbers": ("SIZES = [", (Repeat((Repeat((DIGIT,), 1, 3), *word(", ")), 1, EVER),)),
    "assignments": (
        "    def __init__(self, name, value):\n",
        (Repeat((*word("        self."), NAME, *word(" = "), NAME, *word("\n")), 1, EVER),),
    ),
    "JSON schema": ("RECORDS = ", (*word("["), Repeat(RECORD, 1, EVER))),
}
"""What a text is begun with, and how it must go on."""


def nexts(pattern: tuple[Any, ...]) -> Iterator[tuple[frozenset[int], tuple[Any, ...]]]:
    """Yield the bytes that a pattern may begin with, and what must follow them."""
    if not pattern:
        return
    first, *rest = pattern
    if isinstance(first, Either):
        for option in first.patterns:
            yield from nexts((*option, *rest))
    elif isinstance(first, Repeat):
        once_less = first._replace(least=max(first.least - 1, 0), most=first.most - (first.most < EVER))
        if first.most:
            yield from nexts((*first.pattern, once_less, *rest))
        if not first.least:
            yield from nexts(tuple(rest))
    else:
        yield first, tuple(rest)


def automaton(pattern: tuple[Any, ...], size: int = 320, offset: int = 64) -> TableAutomaton:
    """Return the deterministic automaton of a pattern over so many ids, of which byte b has the id b + `offset`."""
    states, moves = {frozenset([pattern]): 0}, list[dict[int, int]]()
    for state in iter(lambda: list(states)[len(moves)] if len(moves) < len(states) else None, None):
        found = [pair for each in state for pair in nexts(each)]
        after = {
            byte: frozenset(rest for own, rest in found if byte in own) for byte in set().union(*(f[0] for f in found))
        }
        moves.append({byte: states.setdefault(target, len(states)) for byte, target in after.items()})
    following = torch.full((len(moves), size), -1)
    for state, own in enumerate(moves):
        following[state, [byte + offset for byte in own]] = torch.tensor(list(own.values()))
    return TableAutomaton(following.clamp(min=0), following >= 0)


def through(step: Tensor, message: Tensor) -> Tensor:
    """Sum out the state of a message [N, r, a, b] given its parent's, by a step [N, r, r]."""
    return torch.einsum("npz,nzab->npab", step, message)


def drafted(
    circuit: LatentDistribution,
    tokens: Tensor,
    states: Tensor,
    table: TableAutomaton,
    first: int,
    horizons: Sequence[int],
) -> dict[int, Tensor]:
    """Return log q_h [N, n - first] of tokens [N, n] from the position `first` on, by h.

    Automaton states before every position, and at the end, are [N, n + 1].
    """
    end, rows = tokens.shape[1], torch.arange(len(tokens))
    probs = circuit.leaf_logits[:, :end].double().softmax(-1)  # [N, n, r, v]
    seen = probs.gather(-1, tokens[..., None, None].expand(*probs.shape[:-1], 1))[..., None]  # [N, n, r, 1, 1]
    targets = torch.where(table.masks, table.next_states, -1)  # [S, v]
    kinds, kind = targets.unique(dim=1, return_inverse=True)  # [S, C], [v]: tokens that move all states alike
    mass = probs.new_zeros(*probs.shape[:-1], kinds.shape[1]).index_add(-1, kind, probs)  # [N, n, r, C]
    edges = (kinds.T[..., None] == torch.arange(len(kinds))).double()  # [C, S, S]
    free = (mass @ edges.flatten(1)).unflatten(-1, edges.shape[1:])  # [N, n, r, S, S]

    @cache
    def joint(begin: int, stop: int) -> Tensor:
        """log F(begin, stop) [N]: products of [1, 1] at known positions and of [S, S], in the order of the text."""

        def leaf(position: int) -> Tensor | None:
            if position >= stop:
                return None
            if position < begin:
                return seen[:, position]
            whole = free[:, position]
            whole = whole.sum(-1, keepdim=True) if position == stop - 1 else whole
            return whole[rows, :, states[:, begin]][:, :, None] if position == begin else whole

        def span(level: int, index: int) -> Tensor | None:
            assert isinstance(circuit, TreeDistribution)
            if level == circuit.depth:
                position = circuit.slots[index]
                return None if position is None else leaf(position)
            parts = [part for side in (0, 1) if (part := span(level + 1, 2 * index + side)) is not None]
            if not parts:
                return None
            whole = parts[0] if len(parts) == 1 else parts[0] @ parts[1]
            return through(circuit.steps[level - 1][:, index].double(), whole) if level else whole

        if isinstance(circuit, ChainDistribution):
            message = leaf(stop - 1)
            for position in reversed(range(stop - 1)):
                message = leaf(position) @ through(circuit.steps[:, position].double(), message)
        else:
            message = span(0, 0)
        return torch.einsum("nz,nzab->n", circuit.root.double(), message).log()

    def law(horizon: int) -> Tensor:
        stops = [(j, min(j + horizon, end)) for j in range(first + 1, end + 1)]
        return torch.stack([joint(j, stop) - joint(j - 1, stop) for j, stop in stops], -1)

    return {horizon: law(horizon) for horizon in horizons}


def enumerated(kind: str, seed: int) -> dict[str, float]:
    """Return how far the laws of h = 0, 1 and n are from enumeration, and what they keep (v = 5, n = 4, S = 3, r = 3).

    `own` is the target that has the circuit's own distribution, `other` another circuit's, both masked token by token.
    """
    torch.manual_seed(seed)
    (window, size, count, rank), last = (4, 5, 3, 3), {"hmm": "trans_logits", "btree": "node_logits"}[kind]
    shapes = {"leaf_logits": (window, rank, size), "root_logits": (rank,)}
    shapes[last] = (window - 1 if kind == "hmm" else window - 2, rank, rank)
    own, other = (circuit_from_logits(kind, **{k: 2 * torch.randn(1, *s) for k, s in shapes.items()}) for _ in range(2))
    allowed = (torch.rand(count, size) < 0.5).index_fill(1, torch.tensor(0), True)  # token 0 never ends a text
    table = TableAutomaton(torch.randint(count, (count, size)), allowed)
    texts = torch.cartesian_prod(*[torch.arange(size)] * window)  # [N, n]
    states = [torch.zeros(len(texts), dtype=torch.long)]
    for token in texts.unbind(1):
        states.append(table.next_states[states[-1], token].long())
    fits = torch.stack([allowed[state, token] for state, token in zip(states, texts.unbind(1))], 1)  # [N, n]
    same = [(texts[:, None, :j] == texts[None, :, :j]).all(-1) for j in range(window + 1)]

    def joint(weights: Tensor, begin: int, stop: int) -> Tensor:
        return (same[begin] * (weights * fits[:, begin:stop].all(1))).sum(1)  # [N]

    def law(weights: Tensor, horizon: int) -> Tensor:
        stops = [(j, min(j + horizon, window)) for j in range(1, window + 1)]
        return torch.stack([joint(weights, j, e) / joint(weights, j - 1, e) for j, e in stops], -1)  # [N, n]

    alive, horizons, figures = fits.all(1), (0, 1, window), {}
    weights = [each.log_prob(texts[:, None])[:, 0].exp() for each in (own, other)]
    expanded = circuit_from_logits(kind, **{k: getattr(own, k).expand(len(texts), *s) for k, s in shapes.items()})
    laws = drafted(expanded, texts, torch.stack(states, 1), table, 0, horizons)
    for horizon in horizons:
        q = laws[horizon][alive].exp()
        figures[f"error, h = {horizon}"] = float((q - law(weights[0], horizon)[alive]).abs().max())
        assert abs(float(q.prod(-1).sum()) - 1) < 1e-9 or horizon < window  # a law of whole texts that fit
        for name, weight in zip(("own", "other"), weights):
            p = law(weight, 0)[alive]  # masked token by token
            accepted = accepted_along(q.log(), p.log(), torch.ones_like(p).bool())
            figures[f"{name}, h = {horizon}"] = 1 + float((p.prod(-1) * accepted.sum(-1)).sum())
    return figures


@torch.no_grad()
def measured(model: Any, table: TableAutomaton, texts: Tensor, begun: int) -> dict[str, dict[int, Any]]:
    """Return expected calls along texts [B, L] behind their beginnings, and nats per draft, by look-ahead."""
    known = model.distributions(text_of(texts[:, :begun], texts[:, begun:]), DRAFTS)
    size, after = texts.shape[1], [torch.zeros(len(texts), dtype=torch.long)] * begun
    for token in texts[:, begun:].unbind(1):
        after.append(table.next_states[after[-1], token].long())
    state = torch.stack(after, 1)  # [B, L], after every token
    logits = known.target(known.states[:, :-1]).masked_fill(~table.masks[state[:, :-1]], -torch.inf)
    log_p = logits.double().log_softmax(-1).gather(-1, texts[:, 1:, None])[..., 0]  # [B, L - 1], of the next token
    positions = torch.zeros(texts.shape, dtype=torch.bool)
    positions[:, begun - 1 : size - 2] = True
    calls = {h: torch.zeros(*texts.shape, DRAFTS, dtype=torch.double) for h in HORIZONS}
    nats = dict.fromkeys(HORIZONS, 0.0)
    rows, columns = positions.nonzero(as_tuple=True)
    for row, column in zip(rows.split(64), columns.split(64)):
        reach = column[:, None] + torch.arange(DRAFTS + 2)  # [N, m + 2]
        is_left, reach, row_of = reach[:, 2:] < size, reach.clamp(max=size - 1), row[:, None]
        circuit = model.window_distribution(known.states[row, column])
        found = drafted(circuit, texts[row_of, reach[:, 1:]], state[row_of, reach], table, 1, HORIZONS)
        p = log_p[row_of, reach[:, 1:-1].clamp(max=size - 2)]  # [N, m]
        for horizon, q in found.items():
            calls[horizon][row, column] = accepted_along(q, p, is_left)
            nats[horizon] -= float(q[is_left].sum())
    total = float((size - 2 - columns).clamp(max=DRAFTS).sum())
    along = {h: ExpectedCalls.along(accepted, positions) for h, accepted in calls.items()}
    return {"calls": along, "nats": {h: found / total for h, found in nats.items()}}


def rows_of(box: Path, arguments: argparse.Namespace, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row per constraint, head and look-ahead, but for those whose constraint and head are known."""
    done = {(row["constraint"], row["head"]) for row in known}
    held_out = [row["text"] for row in json.loads((box / "held_out.json").read_text())]
    begun = [text[:BEGUN] for text in held_out if len(text) >= BEGUN and text[:BEGUN].isascii()][: arguments.texts]
    for name, (opening, pattern) in CONSTRAINTS.items():
        table = automaton(pattern)
        for kind in ("hmm", "btree"):
            if (name, kind) in done:
                continue
            model, tokenizer = load_box(kind, box)
            prompts = tokenizer([text + "\n" + opening for text in begun], return_tensors="pt")["input_ids"]
            torch.manual_seed(0)  # the same texts for both heads
            how = {"do_sample": True, "top_k": 0, "use_mtp": False, "logits_processor": [table]}
            texts = model.generate(prompts, max_new_tokens=arguments.new, **how)
            found = measured(model, table, texts, prompts.shape[1])
            alone = found["calls"][0]
            for horizon, calls in found["calls"].items():
                gain, error = ratio_of_sums(alone.calls, calls.calls)
                row = {
                    "constraint": name,
                    "head": kind,
                    "look-ahead": horizon,
                    "tokens_per_call": calls.tokens_per_call,
                }
                row |= {
                    "error": calls.standard_error,
                    "gain": gain,
                    "gain_error": error,
                    "nats": found["nats"][horizon],
                }
                yield row | {"states": len(table.masks), "first": calls.by_position[0]}


def summary(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table of the page: a row per constraint and head, tokens per call and gains by look-ahead."""
    shown: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cells = shown.setdefault((row["constraint"], row["head"]), [])
        cells.append(f"{row['tokens_per_call']:.3f} ± {row['error']:.3f}")
        if row["look-ahead"]:
            cells[-1] = f"{100 * (row['gain'] - 1):+.1f} ± {100 * row['gain_error']:.1f} %"
    return [[name, {"hmm": "HMM", "btree": "BTree"}[head], *cells] for (name, head), cells in shown.items()]


def main() -> None:
    """Compare with enumeration; with a box, measure on it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--box", type=Path, help="a box with HMM and BTree heads whose leaves read no byte")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--new", type=int, default=96, help="bytes of each text")
    parser.add_argument("--seeds", type=int, default=10, help="of the enumeration")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for kind in ("hmm", "btree"):
        found = [enumerated(kind, seed) for seed in range(arguments.seeds)]
        worst = {key: max(each[key] for each in found) for key in found[0] if key.startswith("error")}
        means = {key: sum(each[key] for each in found) / len(found) for key in found[0] if key not in worst}
        show(
            ["", *worst, *means], [[kind, *(f"{x:.1e}" for x in worst.values()), *(f"{x:.3f}" for x in means.values())]]
        )
    if arguments.box is None:
        return
    rows = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else []
    for row in rows_of(arguments.box, arguments, list(rows)):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.out:
            replace_file(arguments.out, json.dumps(rows, indent=1) + "\n")
    show(["constraint", "head", *(f"h = {h}" for h in HORIZONS)], summary(rows))


if __name__ == "__main__":
    main()
