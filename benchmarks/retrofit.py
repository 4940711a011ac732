"""Where a new module should start: what `eh_proj` passes on at first, measured on text.

    python benchmarks/retrofit.py                         # about twenty minutes on one core
    python benchmarks/retrofit.py --steps 4000 --module-steps 800 --seeds 3

A small Llama is trained on the Python standard library's source (its own byte-pair vocabulary). Then, with that model
frozen, a module is trained from each start: `embedding` is [I | 0], `hidden` is [0 | I], `both` is half of each, and
`random` a matrix drawn like fresh weights, with the same copied block. The table shows the cross-entropy of the
module's token (two ahead) on held-out source after 0 and more steps, and in the end how often the module's most likely
token is the one that the backbone itself would choose after the true next token (`agrees`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from corpus import SourceText, load_corpus
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead import DeepSeekMTP

STARTS = ("embedding", "hidden", "both", "random")
LENGTH, BATCH, VOCABULARY = 128, 16, 2048


def encoded(tokenizer: ByteLevelBPETokenizer, text: SourceText, limit: int) -> torch.Tensor:
    """Ids of the first `limit` bytes, [number]."""
    return torch.tensor(tokenizer.encode(text.data[:limit].numpy().tobytes().decode("utf-8", "ignore")).ids)


def batches(ids: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Random windows [BATCH, LENGTH] without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - LENGTH, (BATCH,), generator=generator)
        yield ids[starts[:, None] + torch.arange(LENGTH)]


def train(model: torch.nn.Module, data: Iterator[torch.Tensor], steps: int, rate: float) -> None:
    """AdamW with a short warm-up."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95))
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20)
        ids = next(data)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def measure(model: DeepSeekMTP, ids: torch.Tensor) -> tuple[float, float, float]:
    """Held-out loss of backbone and module in nats, and the share of tokens on which they agree."""
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)[:64]
    out = model(windows, labels=windows)
    agrees = (out.mtp_logits[0].argmax(-1) == out.logits[:, 1:].argmax(-1)).float().mean()
    return *out.head_losses.tolist(), float(agrees)


def start(backbone: LlamaForCausalLM, kind: str) -> DeepSeekMTP:
    """A model with one module in the given state."""
    model = DeepSeekMTP.from_backbone(backbone, eh_init="both" if kind == "random" else kind)
    if kind == "random":
        torch.nn.init.normal_(model.mtp[0].eh_proj.weight, std=backbone.config.initializer_range)
    model.train_only("drafter")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="of the backbone")
    parser.add_argument("--module-steps", type=int, default=300)
    parser.add_argument("--bytes", type=int, default=6_000_000, help="of source that is learned")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    corpus, tokenizer = load_corpus(), ByteLevelBPETokenizer()
    size = arguments.bytes
    tokenizer.train_from_iterator(
        [corpus.train.data[: size // 3].numpy().tobytes().decode("utf-8", "ignore")], vocab_size=VOCABULARY
    )
    ids, held_out = encoded(tokenizer, corpus.train, size), encoded(tokenizer, corpus.held_out, size // 30)
    points = [0, arguments.module_steps // 6, arguments.module_steps]
    table = Table(title=f"Llama of {arguments.steps} steps; module after so many steps, held out, nats")
    for column in ("seed", "backbone", "start", *(f"step {point}" for point in points), "agrees"):
        table.add_column(column, justify="right")
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        backbone = LlamaForCausalLM(config)
        train(backbone, batches(ids, seed), arguments.steps, 1.5e-3)
        for kind in STARTS:
            torch.manual_seed(seed)
            model, data = start(backbone, kind), batches(ids, 100 + seed)
            found = [measure(model, held_out)]
            for steps in (points[1], points[2] - points[1]):
                train(model, data, steps, 1e-3)
                found.append(measure(model, held_out))
            losses = (f"{module:.3f}" for _, module, _ in found)
            table.add_row(str(seed), f"{found[-1][0]:.3f}", kind, *losses, f"{found[-1][2]:.3f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
