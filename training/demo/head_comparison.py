"""The head families on one backbone: trained for the same time, then measured on the same held-out text.

Knows how heads are trained and measured; does not know how the figures are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed

from ... import __version__
from ...configuration.head_families import takers
from ...modeling import EvaByteForMTPC, EvaByteTokenizer
from ..data import ByteWindows, SourceText
from ..evaluation import GREEDY, HeadReport, Measurement, bits_per_byte, environment, hardware, sampled
from ..results import MeasuredResults
from .folder import save_checkpoint
from .recipe import Stage, train

FAMILIES = ("ff", "cp", "hmm", "btree")
"""Head families that are compared."""
RANK = 8
"""Rank of the circuits that are compared."""


@dataclass(frozen=True)
class HeadComparison:
    """How heads are compared.

    Attributes:
        train_text: What they learn from.
        held_out: Windows for the likelihood.
        windows: How many of them.
        decoding: What is completed, and for how long.
        command: The command that repeats it.
        minutes: Training time of each head.
        seed: Of the weights, the order of the text and the samples.
    """

    train_text: SourceText
    held_out: ByteWindows
    windows: int
    decoding: Measurement
    command: str
    minutes: float
    seed: int

    def measure(
        self, checkpoint: Path, kind: str, console: Console, callbacks: Sequence[TrainerCallback] = ()
    ) -> HeadReport:
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
        return self._report(model, tokenizer)

    def _report(self, model: EvaByteForMTPC, tokenizer: PreTrainedTokenizerBase) -> HeadReport:
        bits = bits_per_byte(model, self.held_out, self.windows, batch_size=4)
        comparisons = self.decoding.compare({"it": model}, tokenizer, (GREEDY, sampled(1.0)))["it"]
        rows = [comparison.result for comparison in comparisons]
        measured = MeasuredResults(
            results=rows,
            dataset_name="Python standard library source",
            dataset_description=f"{len(rows[0].per_prompt)} held-out prompts, {self.decoding.new_tokens} bytes each.",
            hardware=hardware(),
            dtype=str(model.dtype).removeprefix("torch."),
            command=self.command,
            library_version=__version__,
            accepted_by_position=rows[0].accepted_by_position,
            bits_per_byte=bits[0],
            extra={"Window NLL (nats)": round(sum(bits) * math.log(2), 3), "Minutes of training": self.minutes},
            environment=environment(),
        )
        return HeadReport.of(model, measured)
