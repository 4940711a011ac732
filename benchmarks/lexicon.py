"""Head families on a source whose distribution is known: random words, one symbol after the other.

    python benchmarks/lexicon.py                     # n = 16, r = 8, three training seeds; minutes on a CPU
    python benchmarks/lexicon.py --window 8 --rank 4 --seeds 1 --steps 300
    python benchmarks/lexicon.py --window 8 --rank 4 --seeds 5 --heads ff cp --divergence likelihood tv block

The source draws words of a small lexicon, separated by a blank; its state is the part of the word seen so far. Heads
are tables over states, fitted by the window loss with gamma = 1; or, after a third of the steps, by total variation or
the block loss. Then every family drafts n - 1 symbols from the state
before a kept symbol, conditioned on it, and the tokens per call are *computed* along the same texts of the source for
token and block verification (`tokenahead.training.evaluation.expected`). `alg. 2 (biased)` is the decoder of the MtPC
paper, which drops the symbol that verification added. Its text does not follow the source's distribution, so the
library does not offer it; it stands here for comparison only.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from itertools import product

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tokenahead import MTPHeadConfig
from tokenahead.generation.verification import token_acceptance
from tokenahead.modeling.heads.registry import build_head, init_head
from tokenahead.modeling.heads.teacher import accepted_along, divergence
from tokenahead.modeling.heads.window_distribution import WindowDistribution, window_distribution
from tokenahead.training.evaluation.expected import SAMPLED, ExpectedCalls, acceptance_along

BLANK, SYMBOLS = 0, 27
WINDOWS_PER_STEP, PEAK_RATE = 1024, 0.2
LENGTH = 200
"""Symbols of a text."""


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
    """Loss of windows [N, n]: `"likelihood"`, `"tv"` or `"block"`, given log-probabilities of the source [N, n, 27]."""
    if kind == "likelihood":
        return -q.log_prob(tokens).mean()
    if kind == "tv":
        log_q = q.conditional_log_probs(tokens)
        first = -log_q[:, 0].gather(-1, tokens[:, :1]).mean()
        return first + divergence("tv", p[:, 1:], log_q[:, 1:]).sum(-1).mean()
    log_q, log_p = q.token_log_probs(tokens)[:, 1:], p.gather(-1, tokens[..., None])[:, 1:, 0]
    return -accepted_along(log_q, log_p, torch.ones_like(log_q, dtype=torch.bool)).sum(-1).mean()


def fit(source: Lexicon, config: MTPHeadConfig, steps: int, seed: int, kind: str = "likelihood") -> torch.nn.Module:
    """A head whose hidden states are one-hot states, fitted to windows of the source."""
    torch.manual_seed(seed)
    width = len(source.distribution)
    head = build_head(config, width, SYMBOLS)
    init_head(head)
    optimizer = torch.optim.Adam(head.parameters(), betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps, pct_start=0.1)
    with torch.no_grad():  # components that start alike would separate late: a table has no features to share
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter))
    log_probs = source.distribution.log().float()
    for step in track(range(steps), description=f"{config.head_type} seed {seed}", transient=True):
        state = source.stationary_pool[torch.randint(0, len(source.stationary_pool), (WINDOWS_PER_STEP,))]
        tokens, after = source.sample(state, config.window)
        hidden = torch.nn.functional.one_hot(state, width).float()
        p = log_probs[torch.cat([state[:, None], after[:, :-1]], 1)]
        now = "likelihood" if 3 * step < steps else kind
        loss = loss_of(now, window_distribution(head, config, hidden), p, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return head


@torch.no_grad()
def evaluate(source: Lexicon, head: torch.nn.Module, config: MTPHeadConfig, texts: int) -> dict[str, float]:
    """Window NLL in nats, and expected tokens per call along so many texts of the source."""
    torch.manual_seed(1234)
    begun = source.stationary(texts)
    symbols, after = source.sample(begun, LENGTH)
    before = torch.cat([begun[:, None], after[:, :-1]], 1)
    n, width = config.window, len(source.distribution)
    windows = torch.nn.functional.pad(symbols, (0, n - 1)).unfold(1, n, 1)
    states = torch.nn.functional.pad(before, (0, n - 1)).unfold(1, n, 1)
    places = torch.ones(texts, LENGTH - 1, dtype=torch.bool)
    parts: dict[str, list[ExpectedCalls]] = {rule: [] for rule in SAMPLED}
    nll = []
    for row, state in enumerate(states):
        hidden = torch.nn.functional.one_hot(state[:, 0], width).float()
        distribution = window_distribution(head, config, hidden)
        nll.append(-distribution.log_prob(windows[row])[: 1 - n].mean())
        q, p = distribution.conditional_log_probs(windows[row])[:-1, 1:], source.distribution[state[:-1, 1:]].log()
        for rule, found in parts.items():
            accepted = acceptance_along(q, p, windows[row, :-1, 1:], 1.0, rule)
            found.append(ExpectedCalls.along(accepted[None], places[row, None]))
        if not row:
            first = torch.nn.functional.one_hot(begun, width).float()
            biased = algorithm_2(source, window_distribution(head, config, first), begun)
    rules = {rule: sum(found[1:], found[0]).tokens_per_call for rule, found in parts.items()}
    return {"nll": float(torch.stack(nll).mean()), **rules, "alg. 2 (biased)": biased}


def algorithm_2(source: Lexicon, distribution: object, state: torch.Tensor) -> float:
    """Tokens per call of the paper's Algorithm 2: (sum A_i + 1 - A_1) / (2 - A_1), A_i for fresh drafts."""
    draft, q = distribution.sample_with_probs(distribution.window)
    accept, _ = token_acceptance(draft, q.double(), source.along(state, draft))
    kept = accept.cumprod(1).mean(0)
    return float((kept.sum() + 1 - kept[0]) / (2 - kept[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--heads", nargs="+", default=["ff", "cp", "hmm", "btree"])
    parser.add_argument("--divergence", nargs="+", default=["likelihood"], choices=["likelihood", "tv", "block"])
    arguments = parser.parse_args()
    source = Lexicon()
    bits = source.entropy()
    console = Console(width=120)
    console.print(
        f"{len(source.distribution)} states, {bits:.2f} bits per symbol; "
        f"best window NLL {bits * math.log(2) * arguments.window:.2f}"
    )
    table = Table(
        title=f"n = {arguments.window}, r = {arguments.rank}: mean over {arguments.seeds} training seeds (min .. max)"
    )
    for column in (
        "head",
        "loss",
        "window NLL",
        "tokens/call, token",
        "tokens/call, block",
        "alg. 2 (biased)",
        "s",
    ):
        table.add_column(column, justify="right")
    for kind, loss in product(arguments.heads, arguments.divergence):
        config = MTPHeadConfig(head_type=kind, window=arguments.window, rank=1 if kind == "ff" else arguments.rank)
        started = time.perf_counter()
        runs = []
        for seed in range(arguments.seeds):
            runs.append(evaluate(source, fit(source, config, arguments.steps, seed, loss), config, arguments.texts))
        cell = {key: _spread([run[key] for run in runs]) for key in runs[0]}
        took = f"{(time.perf_counter() - started) / arguments.seeds:.0f}"
        table.add_row(kind, loss, cell["nll"], cell["token"], cell["block"], cell["alg. 2 (biased)"], took)
    console.print(table)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


if __name__ == "__main__":
    main()
