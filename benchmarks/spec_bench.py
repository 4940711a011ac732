"""Tokens per call on Spec-Bench along a model's own answers, at several temperatures, of drafters that draft chains.

    python benchmarks/spec_bench.py --model HuggingFaceTB/SmolLM2-135M-Instruct --questions question.jsonl \\
        --trained EAGLE-1=model_cards/smollm2/eagle1 Hydra=model_cards/smollm2/hydra BTree=model_cards/smollm2/btree \\
        --decoded 'recycling=recycling?draft_tree={"total_tokens":16}' --output spec_bench.json

The model answers first turns plainly (96 tokens), once greedily and so often at each temperature. Along each answer:

- trained drafters: expected verifications, exactly (`tokenahead.training.evaluation.drafts`)
- n-grams and suffixes: verifications, exactly; their drafts follow from the text, and one that the text does not go on
  with was rejected. A model that writes the answer whatever it is asked (`Written`) counts them
- suffixes, and where unsure the first trained drafter: the same; its accepted drafts are drawn given the answer
- `--decoded`: what needs the model's logits off the text decodes a few prompts of each category

Lengths are constant, and every drafter knows its prompt alone. A run is a row of the file, which is continued; errors
are those of a ratio of sums over prompts, all runs of a prompt together.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from measuring import markdown, resumed
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tokenahead import DrafterCascade, NgramDrafter, SuffixDrafter
from tokenahead.extending import AttachableDrafter, DraftSession, DraftTree, Sequences
from tokenahead.generation.backbone.wrapped_models import untyped
from tokenahead.modeling.common.teacher import accepted_along
from tokenahead.training import regenerate
from tokenahead.training.evaluation import PromptEncoder
from tokenahead.training.evaluation.decoding import DecodingMode, Method, methods_of, named_mode
from tokenahead.training.evaluation.drafts import ExpectedCalls, ratio_of_sums, text_of
from tokenahead.training.evaluation.prompts import Prompt, read_prompts
from tokenahead.training.loading import load_model


class Remembered:
    """A backbone's forward that keeps its outputs of the last whole text: all drafters ask for the same ones."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.forward, self.ids, self.outputs = model.forward, torch.empty(0), None
        model.forward = self

    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        """Return outputs with all hidden states."""
        if options.get("use_cache", True):
            return self.forward(input_ids, **options)
        if not torch.equal(self.ids, input_ids):
            self.ids = input_ids
            self.outputs = self.forward(input_ids, **options | {"output_hidden_states": True})
        return self.outputs


class Written(LlamaForCausalLM):
    """Writes a text, whatever it is asked."""

    def __init__(self, vocabulary: int) -> None:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        places = {"max_position_embeddings": 8192, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
        super().__init__(LlamaConfig(vocab_size=vocabulary, **sizes, **places))
        self.text = torch.empty(0, dtype=torch.long)

    def forward(self, input_ids: Any, past_key_values: Any, logits_to_keep: Any = 0, **options: Any) -> Any:
        """Return logits [1, k, V] that are sure of the text's next tokens."""
        begun = past_key_values.get_seq_length() + 1
        out = super().forward(input_ids, past_key_values=past_key_values, logits_to_keep=logits_to_keep, **options)
        ahead = torch.arange(begun, begun + input_ids.shape[1])[-out.logits.shape[1] :]  # [k]
        following = self.text[ahead.clamp(max=len(self.text) - 1)]
        out.logits = one_hot(following, out.logits.shape[-1])[None].float()
        return out


class Drawn(AttachableDrafter):
    """Drafts as many right tokens as another drafter does, drawn from their distribution given the text."""

    def __init__(self, accepted: Tensor, text: Tensor, config: Any) -> None:
        self.accepted, self.text, self.config = accepted, text, config  # m_k [L, m], ids [L]

    def longest_draft(self) -> int:
        return self.accepted.shape[1]

    default_draft = longest_draft

    def start(self, options: Any) -> DrawnSession:
        return DrawnSession(self)


class DrawnSession(DraftSession):
    """The drafts of one call."""

    def __init__(self, drafter: Drawn) -> None:
        self.drafter, self.num_tokens = drafter, drafter.longest_draft()

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Draft right tokens, and a wrong one behind them."""
        known, text = tokens.lengths[0], self.drafter.text
        chain = text[known : known + length].clone()
        right = int((self.drafter.accepted[known - 2, : len(chain)] > torch.rand(())).sum())
        chain[right:] = (chain[right:] + 1) % self.drafter.config.vocab_size
        return DraftTree.chain(chain[None])


def acceptance_of(drafter: Any, text: dict[str, Tensor], length: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return m_k [1, L, m] behind all positions of a text by block verification or greedily, and where cycles begin."""
    ids, first = text["input_ids"][0], int((text["labels"][0] < 0).sum())
    columns = torch.arange(first - 1, len(ids) - 2)  # whose next token is known, and a further one follows
    ahead = columns[:, None] + 1 + torch.arange(length + 1)  # [N, m + 1]
    tokens, is_drafted = ids[ahead.clamp(max=len(ids) - 1)], ahead[:, 1:] < len(ids)
    known = drafter.distributions(text, length)
    draft = known.draft(torch.zeros_like(columns), columns, tokens)  # [N, m, V]
    if temperature:
        logits = known.target(known.states[0, first:-1]).float()  # of tokens first + 1, ...
        p = (logits / temperature).log_softmax(-1).gather(-1, ids[first + 1 :, None])[:, 0]
        q = (draft / temperature).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].double()
        p = p[(ahead[:, 1:] - first - 1).clamp(max=len(p) - 1)].double()  # [N, m]
        shares = accepted_along(q, p, is_drafted)
    else:
        shares = ((draft.argmax(-1) == tokens[:, 1:]) & is_drafted).double().cumprod(-1)
    accepted, positions = torch.zeros(1, len(ids), length).double(), torch.zeros(1, len(ids), dtype=torch.bool)
    accepted[0, columns], positions[0, columns] = shares, True
    return accepted, positions


def replayed(written: Written, drafter: AttachableDrafter, text: dict[str, Tensor]) -> list[float]:
    """Return the tokens of an answer after its first, and the verifications that write them."""
    prompt = text["input_ids"][:, : int((text["labels"] < 0).sum())]
    written.text, count = text["input_ids"][0], text["input_ids"].shape[1] - prompt.shape[1]
    options = {"do_sample": False, "num_assistant_tokens_schedule": "constant", "max_new_tokens": count}
    drafter.attach(written)
    out = untyped(written).generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **options)
    drafter.detach()
    assert torch.equal(out.sequences[0], written.text)
    return [count - 1, len(out.speculation.rows_accepted[0])]


class Study:
    """Prompts, the model that answers them, and drafters."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.seen = asked, Counter[str]()
        self.model, tokenizer = load_model(asked.model, asked.dtype, "cpu")
        self.prompts, encoder = list[tuple[Prompt, int, Tensor]](), PromptEncoder(tokenizer)
        for prompt in read_prompts(asked.questions)[0]:
            ids = encoder.batch([prompt], [[]], self.model.device)["input_ids"]
            if ids.shape[1] <= asked.longest and self.seen[prompt.category] < asked.per_category:
                self.prompts.append((prompt, self.seen[prompt.category], ids))
                self.seen[prompt.category] += 1
        self.trained = self.methods([each.replace("=", "=auto:", 1) for each in asked.trained])
        self.decoded = self.methods(asked.decoded)
        self.written = Written(self.model.config.vocab_size)
        Remembered(self.model)

    def methods(self, specs: list[str]) -> list[Method]:
        """Return methods of this library."""
        methods, refused = methods_of(specs, self.model)
        if refused:
            raise SystemExit(json.dumps(refused))
        return methods[1:]

    def texts(self, mode: DecodingMode, run: int) -> list[dict[str, Tensor]]:
        """Return the model's answers, as `text_of` has them; they are written once."""
        folder, prompts = self.asked.output.with_suffix(""), [ids[0] for *_, ids in self.prompts]
        how = {"max_new_tokens": self.asked.new_tokens, "batch_size": 16, "seed": run} | mode.options
        rows = regenerate(self.model, prompts, folder / f"{mode.name}, {run}", **how).rows
        return [text_of(*torch.tensor([row["ids"]]).tensor_split([row["prompt"]], 1)) for row in rows]

    @torch.no_grad()
    def measure(self, name: str) -> dict[str, Any]:
        """Return the categories of prompts, or tokens and verifications of the answers of a run, by drafter."""
        if name == "prompts":
            return {prompt.name: prompt.category for prompt, *_ in self.prompts}
        words, run = name.split(", run ")
        mode, found = named_mode(words), dict[str, dict[str, list[float]]]()
        torch.manual_seed(int(run))
        for (prompt, number, ids), text in zip(self.prompts, self.texts(mode, int(run))):
            if text["input_ids"].shape[1] < ids.shape[1] + 2:
                continue  # an answer of one token takes no verification
            counts = self.along(text, mode.temperature)
            if run == "0" and number < self.asked.decoded_per_category:
                counts |= {method.name: self.counted(method, ids, mode) for method in self.decoded}
            for drafter, count in counts.items():
                found.setdefault(drafter, {})[prompt.name] = count
        return found

    def along(self, text: dict[str, Tensor], temperature: float) -> dict[str, list[float]]:
        """Return the tokens of an answer after its first, and their verifications, by drafter."""
        counts, lookups = dict[str, list[float]](), {"n-grams": NgramDrafter(), "suffixes": SuffixDrafter()}
        for method in self.trained:
            accepted, positions = acceptance_of(method.drafter, text, self.asked.length, temperature)
            expected = ExpectedCalls.along(accepted, positions)
            counts[method.name] = [int(expected.tokens), round(float(expected.calls), 4)]
            last = Drawn(accepted[0], text["input_ids"][0], self.written.config)
            lookups.setdefault("cascade", DrafterCascade([SuffixDrafter(), last]))
        return counts | {name: replayed(self.written, drafter, text) for name, drafter in lookups.items()}

    def counted(self, method: Method, ids: Tensor, mode: DecodingMode) -> list[float]:
        """Decode, and return the same of what is written."""
        options = mode.options | {"num_assistant_tokens_schedule": "constant", "max_new_tokens": self.asked.new_tokens}
        out = method.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        return [out.sequences.shape[1] - ids.shape[1] - 1, len(out.speculation.rows_accepted[0])]


def rate(rows: list[tuple[str, list[float]]]) -> str:
    """Return the tokens per verification of answers, and their error; the answers to a prompt are one."""
    sums: dict[str, list[float]] = {}
    for prompt, count in rows:
        sums[prompt] = [x + y for x, y in zip(count, sums.get(prompt, (0.0, 0.0)))]
    ratio, error = ratio_of_sums(*torch.tensor(list(sums.values())).unbind(1))
    return f"{ratio:.2f} ± {error or 0:.2f}"


def rows_of(results: dict[str, Any], way: str, drafter: str, category: str | None = None) -> list[Any]:
    """Return prompts and counts of the answers of all runs, of a category or of all."""
    counts = (run.get(drafter, {}).items() for name, run in results.items() if name.startswith(f"{way}, "))
    return [row for run in counts for row in run if category in (None, results["prompts"][row[0]])]


def summary(results: dict[str, Any]) -> list[list[str]]:
    """Return a row for every drafter: its tokens per verification, by way of decoding."""
    ways = list(dict.fromkeys(name.split(", ")[0] for name in results if name != "prompts"))
    table = [["drafter", "prompts", *ways]]
    for drafter, counts in results[f"{ways[0]}, run 0"].items():
        table.append([drafter, str(len(counts)), *(rate(rows_of(results, way, drafter)) for way in ways)])
    return table


def by_category(results: dict[str, Any], way: str) -> list[list[str]]:
    """Return a row for every category: the tokens per verification of every drafter."""
    drafters, kinds = list(results[f"{way}, run 0"]), dict.fromkeys(results["prompts"].values())
    rows = ([kind, *(rate(rows_of(results, way, drafter, kind)) for drafter in drafters)] for kind in kinds)
    return [["category", *drafters], *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--questions", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--trained", nargs="*", default=[], help="NAME=FOLDER of drafters of chains")
    parser.add_argument("--decoded", nargs="*", default=[], help="methods of `tokenahead bench` that are decoded")
    parser.add_argument("--decodings", nargs="+", default=["greedy", "T=0.7", "T=1"])
    parser.add_argument("--runs", type=int, default=3, help="of sampled answers")
    parser.add_argument("--per-category", type=int, default=20)
    parser.add_argument("--decoded-per-category", type=int, default=3)
    parser.add_argument("--longest", type=int, default=768, help="tokens of a prompt; longer ones are left out")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--length", type=int, default=3, help="of trained drafters' drafts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, default=Path("spec_bench.json"))
    asked = parser.parse_args()
    names = [f"{way}, run {run}" for run in range(asked.runs) for way in asked.decodings if way != "greedy" or not run]
    results = resumed(asked.output, ["prompts", *names], Study(asked).measure)
    for table in summary(results), by_category(results, asked.decodings[-1]):
        print(markdown(table[0], table[1:]))


if __name__ == "__main__":
    main()
