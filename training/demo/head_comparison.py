"""The head families on one backbone: trained for the same time, then measured on the same held-out text.

Knows how heads are trained and measured; does not know how the figures are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed

from ...configuration.head_families import takers
from ...model_cards import DecodingResult
from ...modeling import EvaByteForMTPC, EvaByteTokenizer
from ..data import ByteWindows, SourceText
from ..evaluation import GREEDY, bits_per_byte, compare_decoding, sampled
from .folder import save_checkpoint
from .recipe import Stage, train

FAMILIES = ("ff", "cp", "hmm", "btree")
"""Head families that are compared."""
RANK = 8
"""Rank of the circuits that are compared."""


@dataclass(frozen=True)
class HeadFigures:
    """What one head does on a backbone.

    Attributes:
        head_type: Its family.
        window: n.
        rank: r (1 for FF).
        parameters: Of the head.
        window_nll: Held-out -log q of a window given the text before it, in nats.
        greedy: Greedy decoding, drafted and plain.
        sampled: Sampling at temperature 1, drafted and plain.
    """

    head_type: str
    window: int
    rank: int
    parameters: int
    window_nll: float
    greedy: DecodingResult
    sampled: DecodingResult

    @property
    def name(self) -> str:
        """Family and rank."""
        return f"{self.head_type} {self.rank}" if self.head_type in takers("rank") else self.head_type

    def as_dict(self) -> dict[str, object]:
        """Everything, for a file of figures."""
        return asdict(self)


def cycle_ms(result: DecodingResult) -> float:
    """Milliseconds per call of the backbone, drafting and verification included."""
    return 1000 * result.seconds / result.backbone_calls


@dataclass(frozen=True)
class HeadComparison:
    """How heads are compared.

    Attributes:
        train_text: What they learn from.
        held_out: Windows for the likelihood.
        windows: How many of them.
        prompts: Texts to complete.
        new_bytes: Bytes to write after each.
        minutes: Training time of each head.
        seed: Of the weights, the order of the text and the samples.
    """

    train_text: SourceText
    held_out: ByteWindows
    windows: int
    prompts: list[str]
    new_bytes: int
    minutes: float
    seed: int

    def measure(
        self, checkpoint: Path, kind: str, console: Console, callbacks: Sequence[TrainerCallback] = ()
    ) -> HeadFigures:
        """Trains one head on the backbone of `checkpoint`, saves it in `checkpoint/heads/<kind>`, and measures it."""
        set_seed(self.seed)
        options = {"head_type": kind} | ({"rank": RANK} if kind in takers("rank") else {})
        model = EvaByteForMTPC.from_pretrained(checkpoint, mtp_head=options)
        tokenizer = EvaByteTokenizer.from_pretrained(checkpoint)
        # many small steps: in equal time, a circuit gains more from more updates than from more text per update
        stage = Stage(f"{kind} head alone", "heads", share=1.0, length=256, rows=1, rates=(1.0, 0.0))
        train(model, self.train_text, self.minutes, console, self.seed, [stage], callbacks)
        folder = checkpoint / "heads" / kind
        folder.parent.mkdir(exist_ok=True)
        save_checkpoint(folder, model, tokenizer, {"head": options, "minutes": self.minutes})
        return self._figures(model, tokenizer)

    def _figures(self, model: EvaByteForMTPC, tokenizer: PreTrainedTokenizerBase) -> HeadFigures:
        bits = bits_per_byte(model, self.held_out, self.windows, batch_size=4)
        arguments = (model, tokenizer, self.prompts)
        config = model.config.mtp_head
        return HeadFigures(
            head_type=config.head_type,
            window=model.window,
            rank=config.rank,
            parameters=sum(parameter.numel() for parameter in model.head.parameters()),
            window_nll=sum(bits) * math.log(2),
            greedy=compare_decoding(*arguments, GREEDY, self.new_bytes, self.seed).result,
            sampled=compare_decoding(*arguments, sampled(1.0), self.new_bytes, self.seed).result,
        )
