"""What a verification costs by context: a cache that never moves, one that is repacked, and a plain step of one token.

    python benchmarks/cache.py
    python benchmarks/cache.py --shapes 1000x8 4000x4 --picture cache.png
    python benchmarks/cache.py --loop                       # plain decoding through our loop and through transformers'
    python benchmarks/cache.py --compiled --size 768x12     # static caches: drafts and plain decoding, compiled or not

A Llama of 4 layers, width 256, with grouped heads; blocks of 6 tokens; every sequence keeps a random number of them.
Processor time of one thread by turns, in milliseconds, medians; bytes are those that copying operators write. The
memory of a cache is that of its layers and of the largest copy that is made of one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import by_turns, llama, show
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, CompileConfig, DynamicCache

from tokenahead import NgramDrafter
from tokenahead.configuration.cache_names import CACHE
from tokenahead.extending import AttachableDrafter, DraftSession
from tokenahead.generation.backbone.repacking import RealignedBackbone
from tokenahead.generation.backbone.target import DynamicCacheBackbone, RaggedBackbone
from tokenahead.generation.call.sequences import NewTokens
from tokenahead.generation.contract import DraftTree

BLOCK, ROUNDS, CYCLES = 6, 9, 8
KINDS: dict[str, type[DynamicCacheBackbone]] = {"repacked": RealignedBackbone, "never moves": RaggedBackbone}
WRITES = ("copy_", "index_put_", "_index_put_impl_", "index_copy_")
COPIES = ("cat", "gather", "index", "index_select", "clone", "where", "masked_fill", "repeat", "constant_pad_nd")


class Moved(TorchDispatchMode):
    """Counts the bytes that copying operators write, and the most that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in WRITES:
            self.bytes += next(a.nbytes for a in reversed(args) if isinstance(a, torch.Tensor))
        elif name in COPIES and isinstance(out, torch.Tensor):
            self.bytes += out.nbytes
            self.largest = max(self.largest, out.nbytes)
        return out


class Nothing(AttachableDrafter):
    """Drafts nothing, so that our loop decodes plainly."""

    def __init__(self) -> None:
        self._backbones = []

    def longest_draft(self) -> int:
        """One, which is never made."""
        return 1

    def start(self, options: Any) -> DraftSession:
        """A session without drafts."""
        return _Nothing()


class _Nothing(DraftSession):
    num_tokens = 0

    def propose(self, tokens: Any, length: int) -> DraftTree:
        return DraftTree.chain(tokens.ids[:, :0])


def backbone(width: int = 256, layers: int = 4) -> Any:
    """A Llama with grouped heads."""
    return llama(width, layers, 512, num_key_value_heads=width // 64, max_position_embeddings=16384)


def target(kind: type[DynamicCacheBackbone], model: Any, context: int, batch: int) -> DynamicCacheBackbone:
    """A target with a prompt in its cache."""
    cache, ids = DynamicCache(config=model.config), torch.randint(1, 512, (batch, context))
    model(ids, **{CACHE: cache}, logits_to_keep=1)
    room = {"limit": context + (ROUNDS + 2) * CYCLES * BLOCK, "span": BLOCK} if kind is RaggedBackbone else {}
    return kind(model, cache, ids[:, 0], None, None, **room)


def cycle(made: DynamicCacheBackbone, batch: int) -> None:
    """One verification, after which sequences keep different numbers."""
    block = torch.randint(1, 512, (batch, BLOCK))
    made.forward(block, DraftTree.chain(block[:, 1:]), None)
    made.keep(NewTokens(torch.randint(1, BLOCK + 1, (batch,)).tolist(), block.device))


def plain(model: Any, context: int, batch: int) -> Callable[[], None]:
    """A step of transformers' own decoding."""
    cache, ids = DynamicCache(config=model.config), torch.randint(1, 512, (batch, context))
    model(ids, **{CACHE: cache}, logits_to_keep=1)

    def step() -> None:
        model(ids[:, :1], **{CACHE: cache})

    return step


def memory(run: Callable[[], Any], cache: Cache) -> tuple[float, float]:
    """Megabytes that one run moves, and megabytes of the cache at its peak."""
    with Moved() as moved:
        run()
    held = sum(t.nbytes for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor))
    return moved.bytes / 1e6, (held + moved.largest) / 1e6


def draw(path: str, rows: dict[tuple[int, int], dict[str, float]]) -> None:
    """The cost of a cycle by context: a panel per batch size that was measured at several."""
    from matplotlib import pyplot as plt

    counts = Counter(batch for _, batch in rows)
    batches = sorted(batch for batch, count in counts.items() if count > 1) or sorted(counts)
    figure, panels = plt.subplots(1, len(batches), figsize=(4.5 * len(batches), 3.6), squeeze=False)
    for axes, batch in zip(panels[0], batches):
        for name in next(iter(rows.values())):
            points = sorted((context, found[name]) for (context, own), found in rows.items() if own == batch)
            axes.plot(*zip(*points), marker="o", linestyle="--" if name == "plain step" else "-", label=name)
        axes.set(xlabel="tokens of context", title=f"batch {batch}", ylim=(0, None))
    panels[0][0].set_ylabel("processor time of a cycle, ms")
    panels[0][0].legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def compare_cycles(shapes: list[tuple[int, int]], picture: str | None) -> None:
    """Cycles on both caches, and plain steps."""
    model, figures, rows = backbone(), {}, []
    for context, batch in shapes:
        both = {name: target(kind, model, context, batch) for name, kind in KINDS.items()}
        ways = {name: partial(cycle, made, batch) for name, made in both.items()}
        found = by_turns({"plain step": plain(model, context, batch)} | ways, ROUNDS, CYCLES)
        figures[context, batch] = found = {name: 1000 * seconds for name, seconds in found.items()}
        megabytes = [f"{part:.1f}" for name, run in ways.items() for part in memory(run, both[name].cache)]
        ratio = found["repacked"] / found["never moves"]
        rows.append([f"{context}x{batch}", *(f"{own:.1f}" for own in found.values()), f"{ratio:.2f}", *megabytes])
    columns = [f"MB {what}, {name}" for name in KINDS for what in ("moved", "of memory")]
    show(("context x batch", "plain step", *KINDS, "ratio", *columns), rows)
    if picture:
        draw(picture, figures)


def compare_loops(shapes: list[tuple[int, int]]) -> None:
    """Plain decoding by transformers' loop and by ours, which drafts nothing."""
    model, rows, new = backbone(), [], 64
    drafters = {"theirs": None, "ours": Nothing().attach(model)}
    for context, batch in shapes:
        ids = torch.randint(1, 512, (batch, context))
        common = dict(attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        ways = {name: partial(model.generate, ids, assistant_model=own, **common) for name, own in drafters.items()}
        theirs, ours = (1000 * own / new for own in by_turns(ways, ROUNDS).values())
        rows.append([f"{context}x{batch}", f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.3f}"])
    show(("context x batch", "transformers, ms per token", "our loop", "ratio"), rows)


def compare_compiled(size: tuple[int, int], new: int, rounds: int, backend: str) -> None:
    """Drafts and plain decoding of one text, on caches that grow and on compiled static ones."""
    model, ids = backbone(*size), torch.randint(1, 512, (1, 64))
    drafts = {"assistant_model": NgramDrafter(num_tokens=4).attach(model)}
    config: Any = CompileConfig(mode=None, backend=backend)
    config._compile_all_devices = True
    static = dict(cache_implementation="static", compile_config=config)
    options = {"plain": {}, "drafts": drafts, "plain, compiled": static, "drafts, compiled": drafts | static}
    common = dict(max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
    ways = {
        name: partial(model.generate, ids, attention_mask=torch.ones_like(ids), **common, **own)
        for name, own in options.items()
    }
    outputs, graphs, rows = {}, {}, []
    for name, run in ways.items():
        run()
        before = counters["stats"]["unique_graphs"]
        outputs[name] = run()
        graphs[name] = counters["stats"]["unique_graphs"] - before
    for name, seconds in by_turns(ways, rounds).items():
        out = outputs[name]
        per_call = out.speculation.tokens_per_call if "drafts" in name else 1.0
        same = torch.equal(out.sequences, outputs["plain"].sequences)
        rows.append([name, f"{new / seconds:.1f}", f"{per_call:.2f}", same, graphs[name]])
    title = f"{model.num_parameters() / 1e6:.0f}M parameters, {backend}"
    show(("decoding", "tokens/s", "tokens per call", "same text", "graphs of a second call"), rows, title)


def shape(text: str) -> tuple[int, int]:
    """Two numbers with an x between them."""
    first, second = map(int, text.split("x"))
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", type=shape, default=[(200, 1), (200, 8), (1000, 8), (4000, 1), (4000, 4)]
    )
    parser.add_argument("--picture", help="where to draw the cost of a cycle against the context")
    parser.add_argument("--loop", action="store_true", help="compare the loops of plain decoding")
    parser.add_argument("--compiled", action="store_true", help="compare static caches and compiled forwards")
    parser.add_argument("--size", type=shape, default=(768, 12), help="width x layers of the model of --compiled")
    parser.add_argument("--new-tokens", type=int, default=128, help="of --compiled")
    parser.add_argument("--rounds", type=int, default=5, help="of --compiled")
    parser.add_argument("--backend", default="inductor", help="of --compiled")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        if arguments.compiled:
            compare_compiled(arguments.size, arguments.new_tokens, arguments.rounds, arguments.backend)
        elif arguments.loop:
            compare_loops(arguments.shapes)
        else:
            compare_cycles(arguments.shapes, arguments.picture)


if __name__ == "__main__":
    main()
