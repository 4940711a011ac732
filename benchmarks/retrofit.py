"""Layer heads for a tuned model, as Mehra et al. fit them, in equal steps, and what tuning alone implies.

    python benchmarks/retrofit.py --model HuggingFaceTB/SmolLM2-135M-Instruct --train gsm8k_train.jsonl \\
        --held-out gsm8k_test.jsonl --output retrofit.json

Heads for the next token and the second one are decoder layers (`first="own"`, `init="random"` but in rows that say
"copied") over the tokens that answers have most often. The model learns with LoRA on queries, keys and values, or is
frozen. The baseline is the model that learned alone, by LoRA, with the next token summed out (analysis.py). A figure is
the share of held-out tokens among the first five, of the last tokens of answers; their errors are over texts. A cell is
an entry of the file, which is continued.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measuring import resumed
from peft import inject_adapter_in_model
from studies import row_of, train
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedModel, Trainer

from tokenahead import MTPHeads
from tokenahead.modeling.common.draft_vocabulary import frequent_tokens
from tokenahead.training.strategy import TrainingStrategy, lora_config

LORA, RATES = {"train": "lora"}, {"drafter_lr_multiplier": 4.0}
WARMED = {"head_warmup": 20}
CELLS: dict[str, dict[str, Any]] = {
    "heads alone": {},
    "jointly": LORA,
    "jointly, 4 x rate": LORA | RATES,
    "jointly, warm-up": LORA | WARMED,
    "jointly, warm-up, 4 x rate": LORA | WARMED | RATES,
    "jointly, 4 x rate, weighted states": LORA | RATES | {"mix": "weighted"},
    "heads alone, copied": {"init": "copied"},
    "jointly, copied": LORA | {"init": "copied"},
}
SUMMED = ("as it is, summed out", "tuned, summed out")


def read(path: str, tokenizer: Any) -> list[tuple[torch.Tensor, int]]:
    """Return ids of questions and answers, and the lengths of questions; without the calculator's marks."""
    texts = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        question = tokenizer(row["question"] + "\n")["input_ids"]
        answer = tokenizer(re.sub("<<.*?>>", "", row["answer"]))["input_ids"] + [tokenizer.eos_token_id]
        if len(question) + len(answer) <= 192:
            texts.append((torch.tensor(question + answer), len(question)))
    return texts


class Study:
    """Texts to learn from and to measure along."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.tokenizer = asked, AutoTokenizer.from_pretrained(asked.model)
        texts = read(asked.train, self.tokenizer)
        answers = (ids[begun:].tolist() for ids, begun in texts)
        self.draft_ids = frequent_tokens(answers, 8192, self.tokenizer)
        self.rows = [row_of(*text) for text in texts]
        held_out = read(asked.held_out, self.tokenizer)
        self.texts = [ids for ids, begun in held_out if len(ids) - begun > asked.last][: asked.texts]

    def model(self) -> PreTrainedModel:
        """Return the model as it is."""
        return AutoModelForCausalLM.from_pretrained(self.asked.model, dtype=torch.float32).eval()

    def run(self, name: str) -> dict[str, Any]:
        """Train and measure one cell."""
        cell, seed = name.rsplit(", seed ", 1)
        torch.manual_seed(int(seed))
        begun, asked = time.process_time(), self.asked
        model, data = self.model(), [self.rows[i] for i in torch.randperm(len(self.rows))[: asked.batch * asked.steps]]
        how = {"rate": asked.rate, "seed": int(seed), "steps": asked.steps, "rows": asked.batch, "prints": True}
        if cell in SUMMED:
            if cell != SUMMED[0]:
                inject_adapter_in_model(lora_config(model, TrainingStrategy(**LORA)), model)
                train(model, partial(Trainer, data_collator=DataCollatorForSeq2Seq(self.tokenizer)), data, 0, **how)
            shares, bits = self.summed_out(model), self.bits(model)
        else:
            options = dict(CELLS[cell])
            own = {option: options.pop(option) for option in ("mix", "init") if option in options}
            own = {"head_type": "layer", "first": "own", "init": "random"} | own
            heads = MTPHeads.from_backbone(model, 2, draft_ids=self.draft_ids, **own)
            train(heads, TrainingStrategy(**options), data, 0, **how)
            shares, bits = self.of_heads(heads.eval()), self.bits(model)
        seconds = round(time.process_time() - begun)
        print(name, shares.mean((0, 1)), bits, seconds, flush=True)
        return {"top_5": shares.mean(1).round(decimals=4).tolist(), "bits_per_token": bits, "seconds": seconds}

    def places(self, ids: torch.Tensor) -> list[int]:
        """Return the columns after which the next two tokens are guessed."""
        return list(range(len(ids) - 2 - self.asked.last, len(ids) - 2))

    @torch.no_grad()
    def summed_out(self, model: PreTrainedModel) -> torch.Tensor:
        """Return whether tokens are among the first five, [texts, places, 2]."""
        places = map(self.places, self.texts)
        return torch.stack([hits(marginals(model, ids, own), ids, own) for ids, own in zip(self.texts, places)])

    @torch.no_grad()
    def of_heads(self, heads: MTPHeads) -> torch.Tensor:
        """Return the same of heads."""
        found = []
        for ids in self.texts:
            places = self.places(ids)
            ahead = torch.zeros(1, len(ids), 2, dtype=torch.long)
            laws = heads.distribution(ids[None]).conditional_log_probs(ahead)[0, places]
            found.append(hits(laws, ids, places))
        return torch.stack(found)

    @torch.no_grad()
    def bits(self, model: PreTrainedModel) -> float:
        """Return the model's own bits per token on these places' next tokens."""
        found = []
        for ids in self.texts:
            ends = torch.tensor(self.places(ids))
            laws = model(ids[None]).logits[0, ends].log_softmax(-1)
            found.append(-laws.gather(1, ids[ends + 1, None]).mean())
        return round(float(torch.stack(found).mean()) / 0.693147, 4)


@torch.no_grad()
def marginals(model: PreTrainedModel, ids: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Return laws [places, 2, V] of the next token and the second one after places of a text, the next summed out.

    Of the next token the least set that holds .99 is looked at, of at most 32, renormalised (the paper's appendix A.1):
    as `analysis.marginal_log_probs`, in one call for all places, in which a token behind one sees the text until there.
    """
    ends = torch.tensor(places)
    probs = model(ids[None]).logits[0, ends].double().softmax(-1)  # [P, V]
    likely, tokens = probs.topk(32)
    weights = likely * (likely.cumsum(-1) - likely < 0.99)
    places_of, ranks = weights.nonzero(as_tuple=True)  # [N]
    count, columns = len(ids), torch.arange(len(ids) + len(ranks))
    seen = columns[None, :] <= torch.cat([columns[:count], ends[places_of]])[:, None]
    seen[:, count:] = False
    seen |= torch.eye(len(columns), dtype=torch.bool)
    mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]
    text = torch.cat([ids, tokens[places_of, ranks]])[None]
    positions = torch.cat([columns[:count], ends[places_of] + 1])[None]
    after = model(text, attention_mask=mask, position_ids=positions).logits[0, count:].double().softmax(-1)
    second = torch.zeros_like(probs).index_add_(0, places_of, weights[places_of, ranks, None] * after)
    return torch.stack([probs, second / weights.sum(-1, keepdim=True)], 1).log()


def hits(laws: torch.Tensor, ids: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Return whether the next two tokens are among the first five of laws [places, 2, V]."""
    ahead = torch.stack([ids[[place + 1, place + 2]] for place in places])  # [places, 2]
    return (laws.topk(5, -1).indices == ahead[..., None]).any(-1).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--train", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", default=[SUMMED[1], *CELLS])
    parser.add_argument("--output", type=Path, default=Path("retrofit.json"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"{cell}, seed {seed}" for seed, cell in product(asked.seeds, asked.only)]
    resumed(asked.output, names, Study(asked).run)


if __name__ == "__main__":
    main()
