"""Head families on a source whose distribution is known: random words, one symbol after the other.

    python benchmarks/lexicon.py --table rank families start losses --seeds 5 --out lexicon.json

The source draws words of a small lexicon, separated by a blank; its state is the part of the word seen so far. Heads
are tables over states, fitted in equal steps by the window loss with gamma = 1, or, after a third of the steps, by
another loss. Every family then drafts n - 1 symbols from the state before a kept symbol, conditioned on it:

- `token`, `block`: tokens per call of token and block verification, computed along texts of the source, without drawing
- `decoded`: tokens per call of block verification, counted while decoding
- `biased`: the decoder of the MtPC paper, which drops the symbol that verification added. Its text does not follow
  the source's distribution, so the library does not offer it; it stands here for comparison only.

Tables: `rank` (of CP, n = 8), `families` (n = 8 and 16, r = 8), `start` (of HMM at r = 32: identity bias, homogeneous
or not, contextual or not), `losses` (n = 8, r = 4). Every finished cell is a row of the file, `seconds` the processor
time of its training; the command goes on where it ended, one training seed after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measuring import show

from tokenahead import MTPHeadConfig
from tokenahead.generation.verification import token_acceptance, verify
from tokenahead.modeling.common.teacher import accepted_along, divergence
from tokenahead.modeling.heads.registry import build_head, distribution_after, init_head, window_distribution
from tokenahead.modeling.heads.window_distribution import WindowDistribution
from tokenahead.training.evaluation.expected import SAMPLED, ExpectedCalls, acceptance_along

BLANK, SYMBOLS = 0, 27
WINDOWS_PER_STATE, PEAK_RATE = 5, 0.2
LENGTH = 200
"""Symbols of a text that is read."""
CYCLES, BURN_IN = 60, 10
"""Cycles that are decoded per text, and those before the first that counts."""


TABLES = ("rank", "families", "start", "losses")
FAMILIES = ("ff", "cp", "hmm", "btree")
LOSSES = ("likelihood", "kl", "block", "tv")
FIGURES = ("nll", "token", "block", "decoded", "biased", "seconds")


class Lexicon:
    """A source of words.

    Args:
        words: Number of words.
        seed: Of the random words.

    Attributes:
        distribution: [S, 27] next-symbol probabilities per state.
        following: [S, 27] next state, -1 where the symbol cannot follow.
    """

    def __init__(self, words: int = 60, seed: int = 0) -> None:
        source = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 8, (words,), generator=source).tolist()
        texts = {tuple(torch.randint(1, SYMBOLS, (n,), generator=source).tolist()) for n in lengths}
        weights = 1 / torch.arange(1, len(texts) + 1, dtype=torch.float64) ** 0.7
        states: dict[tuple[int, ...], int] = {(): 0}
        counts: dict[tuple[int, int], float] = {}
        for text, weight in zip(sorted(texts), weights[torch.randperm(len(texts), generator=source)].tolist()):
            for i, symbol in enumerate((*text, BLANK)):
                state = states.setdefault(text[:i], len(states))
                counts[state, symbol] = counts.get((state, symbol), 0.0) + weight
        self.distribution = torch.zeros(len(states), SYMBOLS, dtype=torch.float64)
        self.following = torch.full((len(states), SYMBOLS), -1)
        for (state, symbol), count in counts.items():
            text = next(t for t, s in states.items() if s == state)
            self.distribution[state, symbol] = count
            self.following[state, symbol] = 0 if symbol == BLANK else states[(*text, symbol)]
        self.distribution /= self.distribution.sum(-1, keepdim=True)
        self.stationary_pool = self.stationary(20_000)

    def sample(self, state: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Symbols [N, length] from states [N], and the states after each [N, length]."""
        symbols, states = [], []
        for _ in range(length):
            symbol = torch.multinomial(self.distribution[state], 1)[:, 0]
            state = self.following[state, symbol]
            symbols.append(symbol)
            states.append(state)
        return torch.stack(symbols, 1), torch.stack(states, 1)

    def along(self, state: torch.Tensor, symbols: torch.Tensor) -> torch.Tensor:
        """Next-symbol distributions [N, m + 1, 27] before and after each given symbol; uniform behind an impossible
        one."""
        rows = [self.distribution[state]]
        alive = torch.ones_like(state, dtype=torch.bool)
        for symbol in symbols.unbind(1):
            alive &= self.following[state, symbol] >= 0
            state = self.following[state, symbol].clamp(min=0)
            rows.append(torch.where(alive[:, None], self.distribution[state], 1 / SYMBOLS))
        return torch.stack(rows, 1)

    def stationary(self, count: int) -> torch.Tensor:
        """States [count] as they occur in text."""
        return self.sample(torch.zeros(count, dtype=torch.long), 40)[1][:, -1]

    def entropy(self) -> float:
        """Bits per symbol of the text."""
        row = -(self.distribution * self.distribution.clamp(min=1e-300).log2()).sum(-1)
        return float(row[self.stationary(20_000)].mean())


def loss_of(kind: str, q: WindowDistribution, p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of windows [..., n]: `"likelihood"`, `"block"` or a divergence, given log-probabilities of the source
    [..., n, 27]; one number per window."""
    if kind == "likelihood":
        return -q.log_prob(tokens)
    if kind != "block":
        log_q = q.conditional_log_probs(tokens)
        first = -log_q[..., 0, :].gather(-1, tokens[..., :1])[..., 0]
        return first + divergence(kind, p[..., 1:, :], log_q[..., 1:, :]).sum(-1)
    log_q, log_p = q.token_log_probs(tokens)[..., 1:], p.gather(-1, tokens[..., None])[..., 1:, 0]
    return -accepted_along(log_q, log_p, torch.ones_like(log_q, dtype=torch.bool)).sum(-1)


def fit(source: Lexicon, config: MTPHeadConfig, steps: int, seed: int, kind: str = "likelihood") -> torch.nn.Module:
    """A head whose hidden states are one-hot states, fitted to as many windows after every state, by its frequency."""
    torch.manual_seed(seed)
    width = len(source.distribution)
    head = build_head(config, width, SYMBOLS)
    init_head(head)
    optimizer = torch.optim.Adam(head.parameters(), betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps, pct_start=0.1)
    with torch.no_grad():  # components that start alike would separate late: a table has no features to share
        for name, parameter in head.named_parameters():  # logits of sums as a trained backbone's states would give them
            spread = {"sum_weight": 0.5, "sum_bias": 0.0}.get(name, 1.0)
            parameter.add_(spread * torch.randn_like(parameter))
    log_probs = source.distribution.log().float()
    states = torch.arange(width).repeat_interleave(WINDOWS_PER_STATE)
    frequency = torch.bincount(source.stationary_pool, minlength=width) / len(source.stationary_pool)
    hidden = torch.eye(width)[:, None]
    for step in range(steps):
        tokens, after = source.sample(states, config.window)
        p = log_probs[torch.cat([states[:, None], after[:, :-1]], 1)].unflatten(0, (width, -1))
        now = "likelihood" if 3 * step < steps else kind
        losses = loss_of(now, window_distribution(head, config, hidden), p, tokens.unflatten(0, (width, -1)))
        optimizer.zero_grad()
        (losses.mean(1) * frequency).sum().backward()
        optimizer.step()
        schedule.step()
    return head


@torch.no_grad()
def evaluate(source: Lexicon, head: torch.nn.Module, config: MTPHeadConfig, texts: int) -> dict[str, float]:
    """Window NLL in nats, and tokens per call: expected along texts of the source, and decoded."""
    torch.manual_seed(1234)
    begun = source.stationary(texts)
    symbols, after = source.sample(begun, LENGTH)
    before = torch.cat([begun[:, None], after[:, :-1]], 1)
    n, width = config.window, len(source.distribution)
    windows = torch.nn.functional.pad(symbols, (0, n - 1)).unfold(1, n, 1)
    states = torch.nn.functional.pad(before, (0, n - 1)).unfold(1, n, 1)
    positions = torch.ones(texts, LENGTH - 1, dtype=torch.bool)
    parts: dict[str, list[ExpectedCalls]] = {rule: [] for rule in SAMPLED}
    nll = []
    for row, state in enumerate(states):
        hidden = torch.nn.functional.one_hot(state[:, 0], width).float()
        distribution = window_distribution(head, config, hidden)
        nll.append(-distribution.log_prob(windows[row])[: 1 - n].mean())
        q, p = distribution.conditional_log_probs(windows[row])[:-1, 1:], source.distribution[state[:-1, 1:]].log()
        for rule, found in parts.items():
            accepted = acceptance_along(q, p, windows[row, :-1, 1:], 1.0, rule)
            found.append(ExpectedCalls.along(accepted[None], positions[row, None]))
    rules = {rule: sum(found[1:], found[0]).tokens_per_call for rule, found in parts.items()}
    first = window_distribution(head, config, torch.nn.functional.one_hot(begun, width).float())
    counted = decoded(source, head, config, texts)
    biased = algorithm_2(source, first, begun)
    return {"nll": float(torch.stack(nll).mean()), **rules, "decoded": counted, "biased": biased}


def decoded(source: Lexicon, head: torch.nn.Module, config: MTPHeadConfig, texts: int) -> float:
    """Tokens per call of block verification with drafts of n - 1, counted over the cycles of texts."""
    before, width, length = source.stationary(texts), len(source.distribution), config.window - 1
    last = source.sample(before, 1)[0][:, 0]
    kept = 0
    for cycle in range(CYCLES):
        hidden = torch.nn.functional.one_hot(before, width).float()
        draft, q = distribution_after(head, config, hidden, last, length).sample_with_probs(length)
        state = source.following[before, last]
        accepted, added, _ = verify(draft, q.double(), source.along(state, draft))
        kept += int(accepted.sum() + texts) if cycle >= BURN_IN else 0
        passed = [state]  # where a draft is kept, its state exists; what comes behind is not looked at
        for symbol in draft.unbind(1):
            passed.append(source.following[passed[-1], symbol].clamp(min=0))
        before, last = torch.stack(passed, 1).gather(1, accepted[:, None])[:, 0], added
    return kept / (texts * (CYCLES - BURN_IN))


def algorithm_2(source: Lexicon, distribution: WindowDistribution, state: torch.Tensor) -> float:
    """Tokens per call of the paper's Algorithm 2: (sum A_i + 1 - A_1) / (2 - A_1), A_i for fresh drafts."""
    draft, q = distribution.sample_with_probs(distribution.window)
    accept, _ = token_acceptance(draft, q.double(), source.along(state, draft))
    kept = accept.cumprod(1).mean(0)
    return float((kept.sum() + 1 - kept[0]) / (2 - kept[0]))


def cells(table: str) -> Iterator[dict[str, Any]]:
    """Options of heads, and `loss` if it is not likelihood."""
    if table == "rank":
        yield from ({"head_type": "cp", "window": 8, "rank": rank} for rank in (1, 2, 4, 8, 16, 32))
    elif table == "families":
        for window, kind in product((8, 16), FAMILIES):
            yield {"head_type": kind, "window": window, "rank": 1 if kind == "ff" else 8}
    elif table == "start":
        for homogeneous, contextual, bias in product((False, True), (True, False), (0.0, 3.0, None)):
            shape = {"homogeneous": homogeneous, "contextual": contextual, "identity_bias": bias}
            yield {"head_type": "hmm", "window": 8, "rank": 32, **shape}
    else:
        for loss, kind in product(LOSSES, FAMILIES):
            yield {"head_type": kind, "window": 8, "rank": 1 if kind == "ff" else 4, "loss": loss}


def run(source: Lexicon, cell: dict[str, Any], seed: int, steps: int, texts: int) -> dict[str, float]:
    """Figures of one cell of one training seed."""
    options = dict(cell)
    loss = options.pop("loss", "likelihood")
    config = MTPHeadConfig(**options)
    started = time.process_time()
    head = fit(source, config, steps, seed, loss)
    seconds = time.process_time() - started
    figures = evaluate(source, head, config, texts)
    return {"seconds": round(seconds, 1)} | {name: round(value, 4) for name, value in figures.items()}


def print_table(table: str, rows: list[dict[str, Any]]) -> None:
    """Print a table: means over seeds, least and most."""
    options, shown = list(dict.fromkeys(name for cell in cells(table) for name in cell)), []
    for cell in cells(table):
        own = [row for row in rows if row["cell"] == cell]
        if own:
            figures = (_spread([row[name] for row in own]) for name in FIGURES)
            shown.append([*(cell.get(name, "") for name in options), cell["window"] - 1, len(own), *figures])
    columns = (column.replace("_", " ") for column in (*options, "drafts", "seeds", *FIGURES))
    show(columns, shown, f"{table}: mean over training seeds (least .. most)", 160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500, help="of a training")
    parser.add_argument("--texts", type=int, default=200, help="of the source that are read")
    parser.add_argument("--heads", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--out", type=Path, default=Path("lexicon.json"), help="rows, which later calls add to")
    arguments = parser.parse_args()
    source = Lexicon()
    bits = source.entropy()
    print(f"{len(source.distribution)} states, {bits:.2f} bits per symbol; {bits * math.log(2):.3f} nats")
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    for seed, table in product(range(arguments.seeds), arguments.table):
        for cell in (cell for cell in cells(table) if cell["head_type"] in arguments.heads):
            if not any(row["cell"] == cell and row["seed"] == seed for row in rows):
                figures = run(source, cell, seed, arguments.steps, arguments.texts)
                rows.append({"cell": cell, "seed": seed, **figures})
                arguments.out.write_text(json.dumps(rows, indent=0))
    for table in arguments.table:
        print_table(table, rows)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


if __name__ == "__main__":
    main()
