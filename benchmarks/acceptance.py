"""Expected accepted drafts of a demo's heads on held-out text, computed on the same drafts for every rule.

    tokenahead demo --output tokenahead-demo          # trains a backbone, and every head family on it
    python benchmarks/acceptance.py tokenahead-demo

After every held-out prefix a token b is drawn from the backbone. Each head drafts from the state before b, conditioned
on b, and the expected number of accepted drafts is computed exactly, not sampled, for token and for block verification.
`alg. 2 (biased)` is the tokens per call of the MtPC paper's decoder, which drops the token that verification added. Its
text does not follow the backbone's distribution, so the library does not offer it; it stands here for comparison only.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from corpus import ByteWindows, bits_per_byte, load_corpus
from rich.console import Console
from rich.table import Table

from tokenahead import EvaByteForMTPC
from tokenahead.generation.verification.chains import block_acceptance, token_acceptance

COLUMNS = ("head", "window NLL (nats)", "accepted, token", "accepted, block", "tokens/call, block", "alg. 2 (biased)")


def probs_along(model: EvaByteForMTPC, prefix: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """The backbone's distributions before and after every token of a block behind a prefix, [B, m + 1, v] float64."""
    logits = model(torch.cat([prefix, block], dim=1), use_cache=False).logits
    return logits[:, prefix.shape[1] - 1 :].double().softmax(-1)


def expected(model: EvaByteForMTPC, prefixes: torch.Tensor) -> dict[str, float]:
    """Expected accepted drafts by rule, and tokens per call of Algorithm 2."""
    output = model(prefixes, use_cache=False, output_hidden_states=-1)
    distribution = model.window_distribution(output.hidden_states[-1][:, -1])
    first = torch.multinomial(output.logits[:, -1].softmax(-1), 1)
    draft, q = distribution.condition(first[:, 0]).sample_with_probs(model.window - 1)
    p = probs_along(model, prefixes, torch.cat([first, draft], dim=1))[:, 1:]
    q = q.double() / q.double().sum(-1, keepdim=True)
    token, block = token_acceptance(draft, q, p)[0], block_acceptance(draft, q, p)[0]
    fresh, q = distribution.sample_with_probs(model.window)
    kept = token_acceptance(fresh, q.double(), probs_along(model, prefixes, fresh))[0].cumprod(1).mean(0)
    return {
        "token": float(token.cumprod(1).sum(1).mean()),
        "block": float((1 - (1 - block).flip(1).cumprod(1).flip(1)).sum(1).mean()),
        "alg. 2": float((kept.sum() + 1 - kept[0]) / (2 - kept[0])),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of `tokenahead demo`")
    parser.add_argument("--prefixes", type=int, default=192)
    parser.add_argument("--draws", type=int, default=2, help="drafts per prefix")
    parser.add_argument("--seed", type=int, default=0, help="that the demo was run with")
    arguments = parser.parse_args()
    held_out = load_corpus(seed=arguments.seed).held_out
    windows = ByteWindows(held_out, 200)
    chosen = torch.linspace(0, len(windows) - 1, arguments.prefixes).long()
    prefixes = torch.stack([windows[int(index)]["input_ids"] for index in chosen])
    table = Table(title=f"{arguments.prefixes} held-out prefixes, {arguments.draws} drafts each")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for kind in ("ff", "cp", "hmm", "btree"):
        model = EvaByteForMTPC.from_pretrained(arguments.folder / "heads" / kind).eval()
        torch.manual_seed(0)
        runs = [expected(model, part) for _ in range(arguments.draws) for part in prefixes.split(64)]
        mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
        nll = sum(bits_per_byte(model, ByteWindows(held_out, 512), 20, batch_size=4)) * 0.6931471805599453
        cells = (nll, mean["token"], mean["block"], 1 + mean["block"], mean["alg. 2"])
        table.add_row(kind, *(f"{cell:.3f}" for cell in cells))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
