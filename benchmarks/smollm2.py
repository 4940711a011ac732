"""Drafters for SmolLM2-135M-Instruct: its own answers, heads that learn from them against the clock, what they gain.

    python benchmarks/smollm2.py answers --model HuggingFaceTB/SmolLM2-135M-Instruct --questions gsm8k_train.jsonl
    python benchmarks/smollm2.py train eagle3 --minutes 25
    python benchmarks/smollm2.py train eagle3 --minutes 8 --divergence lk --rate 5e-4 --start smollm2/eagle3/final
    python benchmarks/smollm2.py train hydra --minutes 20
    python benchmarks/smollm2.py train cp --minutes 14 --divergence lk --options '{"rank": 4, "unembedding": "shared"}'
    python benchmarks/smollm2.py train block --name markov --steps 1000 --options '{"law": "markov"}'
    python benchmarks/smollm2.py train masked --minutes 20 --rate 2e-3
    python benchmarks/smollm2.py train ff --name ff-1 --options '{"context": 1}' --answers answers.npz --rows 2000
    python benchmarks/smollm2.py measure --questions spec_bench.jsonl
    python benchmarks/smollm2.py measure --questions spec_bench.jsonl --greedy --budgets 16 32 64 128 256 512
    tokenahead bench --methods eagle:smollm2/eagle3/final ...

The model answers prompts that it wrote itself, from the beginning of its chat template on, and the questions of a file
of GSM8K, sampled at temperature 1: then losses estimate acceptance. Answers go on where they were interrupted; those of
other folders are learned where `train --also FOLDER ...` names them. Heads, EAGLE and modules learn over the 8,192
tokens that its answers have most often. Minutes are the processor's, of one thread. The kinds of drafters are in
smollm2_kinds.py. `--budgets` measures trees of likely tokens of independent block drafters: at T = 1, too, no
draw of the model changes a tree.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from smollm2_kinds import KINDS, drafter_of, heads
from studies import read_answers, row_of
from studies import train as fit
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from tokenahead import BlockDrafter
from tokenahead.generation.trees.building import best_prefixes
from tokenahead.modeling.common.draft_vocabulary import frequent_tokens
from tokenahead.modeling.heads.losses import IGNORE
from tokenahead.training import regenerate
from tokenahead.training.evaluation import DraftMeasures
from tokenahead.training.evaluation.drafts import ratio_of_sums, text_of
from tokenahead.training.evaluation.prompts import groups_of, read_prompts
from tokenahead.training.features import cache_features
from tokenahead.training.regeneration import RegeneratedText

MARKS = (5, 10, 20, 60, 120)
"""Minutes after which a head is saved on the way."""
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}


def chat(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a user's message and of the beginning of an answer."""
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)[:512]


def answers(arguments: argparse.Namespace, model: PreTrainedModel) -> None:
    """Let the model write prompts, and answer them and the questions of a file."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    opener = tokenizer.apply_chat_template([{"role": "user", "content": "@@"}], tokenize=False).split("@@")[0]
    start = tokenizer(opener, add_special_tokens=False)["input_ids"]
    how = {"max_new_tokens": 96, "batch_size": 64, "seed": arguments.seed} | SAMPLED
    asked = regenerate(model, [start] * arguments.prompts, arguments.folder / "asked", **how)
    texts = [tokenizer.decode(row["ids"][row["prompt"] :], skip_special_tokens=True).strip() for row in asked.rows]
    own = [text for text in texts if 12 < len(text) < 1200]
    questions = [json.loads(line)["question"] for line in arguments.questions.read_text().splitlines()]
    random.Random(arguments.seed - 1).shuffle(questions)
    mixed = [text for pair in zip(own, questions) for text in pair]
    order = sorted(range(len(mixed)), key=lambda index: (index // 256, len(mixed[index])))  # batches of equal lengths
    prompts = [chat(tokenizer, mixed[index]) for index in order]
    options = {"max_new_tokens": arguments.new_tokens, "batch_size": 32, "seed": arguments.seed + 1} | SAMPLED
    regenerate(model, prompts, arguments.folder / "answers", **options)


class SavesOnTheWay(TrainerCallback):
    """Saves a head when minutes of processor time have passed."""

    def __init__(self, head: Any, seconds: float, folder: Path) -> None:
        self.head, self.folder, self.begun = head, folder, time.process_time()
        self.marks = [mark for mark in MARKS if 60 * mark < seconds]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save what is due."""
        if self.marks and time.process_time() - self.begun >= 60 * self.marks[0]:
            self.head.save_pretrained(self.folder / f"at-{self.marks.pop(0)}")


def own_answers(arguments: argparse.Namespace) -> list[tuple[torch.Tensor, int]]:
    """Return ids of prompts and answers that `answers` has written, and the lengths of prompts."""
    folders = (folder / "answers" for folder in (*arguments.also, arguments.folder))
    rows = (row for folder in folders if folder.is_dir() for row in RegeneratedText(folder).rows)
    return [(torch.tensor(row["ids"]), row["prompt"]) for row in rows if len(row["ids"]) - row["prompt"] >= 8]


def train(arguments: argparse.Namespace, model: PreTrainedModel) -> None:
    """Train a head for some minutes, on features that are computed once."""
    torch.manual_seed(arguments.seed)
    texts = read_answers(arguments.answers, 512) if arguments.answers else own_answers(arguments)
    texts = texts[: arguments.rows]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    draft_ids = frequent_tokens((ids[prompt:].tolist() for ids, prompt in texts), arguments.draft_tokens, tokenizer)
    learner = KINDS.get(arguments.kind, heads)(model, draft_ids, arguments)
    data: Any = [row_of(*text) for text in texts]
    if learner.features is not None:
        data = cache_features(learner.drafter, data, arguments.folder / learner.features)
    folder, seconds = arguments.folder / (arguments.name or arguments.kind), 60 * arguments.minutes
    saves = SavesOnTheWay(learner.drafter, seconds, folder)
    how = {"rate": arguments.rate, "seed": arguments.seed, "bfloat16": model.dtype == torch.bfloat16}
    how["steps"] = arguments.steps
    fit(learner.module, learner.trainer, data, seconds, **how, prints=True, callbacks=[saves])
    learner.finish().save_pretrained(folder / "final")


def plain_texts(arguments: argparse.Namespace, model: PreTrainedModel) -> list[dict[str, torch.Tensor]]:
    """Rows of `text_of`: what the model answers to first turns at T = 1, or greedily; written once."""
    groups = groups_of(read_prompts(arguments.questions)[0], 1, arguments.per_category)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = [chat(tokenizer, group[0].turns[0]) for group in groups]
    name, how = ("texts-greedy", {"do_sample": False}) if arguments.greedy else ("texts", SAMPLED)
    written = regenerate(model, prompts, arguments.folder / name, max_new_tokens=96, **how)
    parts = [torch.tensor([row["ids"]]).tensor_split([row["prompt"]], 1) for row in written.rows]
    return [text_of(prompt, new) for prompt, new in parts if new.shape[1] > 1]


def tree_calls(drafter: BlockDrafter, text: dict[str, torch.Tensor], budgets: list[int]) -> tuple[int, list[int]]:
    """Tokens of a text after its first, and the calls that write them with trees of each budget (`total_tokens`)."""
    ids, begun = text["input_ids"][0], int((text["labels"][0] == IGNORE).sum())
    context = drafter.fuse(drafter.backbone(ids[None], output_hidden_states=True).hidden_states)
    tokens, places = ids.tolist(), torch.zeros(1, drafter.num_drafts, dtype=torch.long)

    @cache
    def hits(place: int) -> list[int]:
        """The nodes of the largest tree that the text follows behind a place, from the first level on."""
        law = drafter.block(context[:, :place], ids[place : place + 1]).distribution
        steps, likely = law.conditional_log_probs(places)[0].topk(max(budgets) - 1)
        found = [-1]
        for number, (_, parent, level, rank) in enumerate(best_prefixes(steps.tolist(), max(budgets) - 1)):
            ahead = place + 1 + level
            if parent == found[-1] and ahead < len(tokens) and tokens[ahead] == likely[level, rank]:
                found.append(number)
        return found[1:]

    calls = []
    for budget in budgets:
        place, count = begun, 0
        while place < len(tokens) - 1:
            place, count = place + 1 + sum(number < budget - 1 for number in hits(place)), count + 1
        calls.append(count)
    return len(tokens) - 1 - begun, calls


def measure_trees(arguments: argparse.Namespace, model: PreTrainedModel) -> None:
    """Tokens per call of independent block drafters by the budget of their trees, along the model's answers."""
    texts, results = plain_texts(arguments, model), dict[str, Any]()
    for folder in sorted(each.parent for each in arguments.folder.glob("*/*/config.json")):
        drafter = drafter_of(folder, model)
        if isinstance(drafter, BlockDrafter) and drafter.law == "independent":
            with torch.no_grad():
                tokens, calls = zip(*(tree_calls(drafter.eval(), text, arguments.budgets) for text in texts))
            ratios = [ratio_of_sums(torch.tensor(tokens), torch.tensor(each)) for each in zip(*calls)]
            figures = {str(budget): ratio for budget, ratio in zip(arguments.budgets, ratios)}
            results[str(folder.relative_to(arguments.folder))] = figures
    print(json.dumps(results, indent=1))
    (arguments.folder / f"budgets-{'greedy' if arguments.greedy else 'sampled'}.json").write_text(json.dumps(results))


def measure(arguments: argparse.Namespace, model: PreTrainedModel) -> None:
    """Expected tokens per call of all drafters, those on the way too, along the model's answers; results are kept."""
    texts, path = plain_texts(arguments, model), arguments.folder / "expected.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for folder in sorted(each.parent for each in arguments.folder.glob("*/*/config.json")):
        name = str(folder.relative_to(arguments.folder))
        drafter = None if name in results else drafter_of(folder, model)
        if drafter is not None:
            measures = DraftMeasures(length=arguments.length)
            for text in texts:
                measures.add(drafter, text)
            names = "tokens_per_call", "standard_error", "by_position"
            results[name] = {f"expected_{each}": getattr(measures.calls["block"], each) for each in names}
            print(name, json.dumps(results[name]), flush=True)
            path.write_text(json.dumps(results, indent=1))


def add_training(step: argparse.ArgumentParser) -> None:
    """Add the options of `train`."""
    step.add_argument("kind", help=f"{', '.join(KINDS)}, or a head type of MTPHeads")
    step.add_argument("--options", type=json.loads, default={}, help="of a new drafter, as JSON: rank, ...")
    step.add_argument("--name", help="of its folder; the kind where it is left out")
    step.add_argument("--minutes", type=float, default=20)
    step.add_argument("--steps", type=int, help="in place of minutes")
    step.add_argument("--divergence", default="cross_entropy", help="but of students and the assistant")
    step.add_argument("--rate", type=float, default=1e-3)
    step.add_argument("--draft-tokens", type=int, default=8192)
    step.add_argument("--start", help="directory of a head to go on with")
    step.add_argument("--also", type=Path, nargs="+", default=[], help="folders with answers, beyond those of --folder")
    step.add_argument("--answers", type=Path, help="ids, lengths and prompts of answers, .npz, in place of --folder's")
    step.add_argument("--rows", type=int, help="answers that are learned, from the first on; all by default")
    step.add_argument("--seed", type=int, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    for name, run in (("answers", answers), ("train", train), ("measure", measure)):
        step = steps.add_parser(name)
        step.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
        step.add_argument("--folder", type=Path, default=Path("smollm2"), help="where everything is written")
        step.add_argument("--device", default="cpu")
        step.add_argument("--dtype", default="bfloat16", help="float32 where the processor multiplies bfloat16 slowly")
        step.add_argument("--threads", type=int, default=1)
        step.set_defaults(run=run)
        if name == "answers":
            step.add_argument("--questions", type=Path, required=True, help="GSM8K's train.jsonl")
            step.add_argument("--prompts", type=int, default=3200, help="that the model writes")
            step.add_argument("--new-tokens", type=int, default=256, help="of an answer, at most")
            step.add_argument("--seed", type=int, default=1, help="another one for more answers in another folder")
        elif name == "measure":
            step.add_argument("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl")
            step.add_argument("--per-category", type=int, default=2, help="questions of each category")
            step.add_argument("--length", type=int, default=3, help="of the drafts")
            step.add_argument("--greedy", action="store_true", help="along greedy answers")
            step.add_argument("--budgets", type=int, nargs="+", default=[], help="of trees, in place of chains")
        else:
            add_training(step)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval().to(arguments.device)
    (measure_trees if getattr(arguments, "budgets", None) else arguments.run)(arguments, model)


if __name__ == "__main__":
    main()
