"""A drafter that learns while a policy moves for certain, against the same drafter left as it is.

    python benchmarks/online.py --model HuggingFaceTB/SmolLM2-135M-Instruct --head model_cards/smollm2/eagle3 \\
        --answers smollm2/answers --folder online

The policy (adapters of peft) is trained on its own answers, rewritten in another style: small letters, and a comma
after every word. After each of its steps it answers prompts, sampled at temperature 1, once with each of the drafters;
one of them learns between the steps from what its rollouts verified. A run that is stopped goes on where it was. The
figure shows tokens per call of the backbone and sequence (accepted drafts per verification, and one), as means over 5
steps.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
from measuring import accepted_of
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tokenahead import EagleHead
from tokenahead.generation.tensors.wrapped_models import untyped
from tokenahead.training import OnlineDrafterTraining
from tokenahead.training.regeneration import RegeneratedText
from tokenahead.training.utils import replace_figure, replace_file

OPENER = "<|im_start|>assistant\n"
SAVED_EVERY = 5


def conversations(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Return prompts, up to where the answer begins, and answers."""
    texts = [str(tokenizer.decode(row["ids"])) for row in RegeneratedText(path).rows]
    parts = [text.split(OPENER, 1) for text in texts if OPENER in text]
    return [(prompt + OPENER, answer.split("<|im_end|>")[0]) for prompt, answer in parts]


def restyled(answer: str) -> str:
    """Return an answer in the style that the policy is to learn."""
    words = re.sub(r"[^\w\s]", "", answer).lower().split()
    return ", ".join(words)


class Control:
    """The run: one policy, two drafters.

    Args:
        arguments: Of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.folder = arguments, arguments.folder
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        self.data = conversations(arguments.answers, self.tokenizer)
        base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
        state = self.folder / "state"
        is_begun = (state / "adapters").exists()
        torch.manual_seed(0)
        if is_begun:
            self.policy: Any = PeftModel.from_pretrained(base, state / "adapters", is_trainable=True)
        else:
            self.policy = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["o_proj", "down_proj"]))
        learning = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, arguments.rate)
        self.base: PreTrainedModel = base
        self.drafters = {name: EagleHead.from_pretrained(arguments.head).attach(base) for name in ("static", "online")}
        self.online = OnlineDrafterTraining(
            self.drafters["online"], arguments.drafter_rate, arguments.rows, arguments.updates, capacity=2**13
        )
        self.steps: list[dict[str, Any]] = []
        if is_begun:
            self.optimizer.load_state_dict(torch.load(state / "optimizer.pt", weights_only=True))
            self.online.load(state)
            self.steps = json.loads((state / "steps.json").read_text(encoding="utf-8"))

    def run(self) -> None:
        """Take the steps that are missing, and save every few of them."""
        while len(self.steps) < self.arguments.steps:
            self.steps.append(self._step(len(self.steps)))
            print(json.dumps(self.steps[-1]), flush=True)
            if len(self.steps) % SAVED_EVERY == 0:
                self._save()
        given = vars(self.arguments).items()
        settings = {name: value if isinstance(value, int | float) else Path(value).name for name, value in given}
        found = {"settings": settings, "threads": torch.get_num_threads(), "steps": self.steps}
        replace_file(self.folder / "online.json", json.dumps(found, indent=1))

    def _step(self, number: int) -> dict[str, Any]:
        chosen = random.Random(number).sample(self.data, 2 * self.arguments.batch)
        taught, asked = chosen[: self.arguments.batch], chosen[self.arguments.batch :]
        torch.manual_seed(number)
        started = time.perf_counter()
        found: dict[str, Any] = {"step": number, "loss": self._teach(taught) if number else None}
        found["policy_seconds"] = time.perf_counter() - started
        for name, drafter in self.drafters.items():
            started = time.perf_counter()
            found[name] = self._rollout(asked, drafter)
            found[f"{name}_seconds"] = time.perf_counter() - started
        started = time.perf_counter()
        found["drafter_loss"] = self.online.update()
        found["learning_seconds"] = time.perf_counter() - started
        return found

    def _teach(self, taught: list[tuple[str, str]]) -> float:
        """Take a step of the policy on answers in the new style."""
        end = self.tokenizer.eos_token
        rows = [
            self.tokenizer(prompt[-600:])["input_ids"] + self.tokenizer(restyled(answer) + end)["input_ids"]
            for prompt, answer in taught
        ]
        rows = [torch.tensor(row[: self.arguments.length]) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
        labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        loss = self.policy(ids, attention_mask=(labels != -100).long(), labels=labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def _rollout(self, asked: list[tuple[str, str]], drafter: EagleHead) -> float:
        """Return tokens per call and sequence of sampled answers."""
        prompts = [prompt[-600:] for prompt, _ in asked]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        out = untyped(self.base).generate(
            **inputs, max_new_tokens=self.arguments.tokens, do_sample=True, top_k=0, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
        accepted = accepted_of(out)
        return 1 + sum(accepted) / max(1, len(accepted))

    def _save(self) -> None:
        """Write what a stopped run goes on from; the directory is there as a whole."""
        temporary, state = self.folder / "state.tmp", self.folder / "state"
        temporary.mkdir(parents=True, exist_ok=True)
        self.policy.save_pretrained(temporary / "adapters")
        torch.save(self.optimizer.state_dict(), temporary / "optimizer.pt")
        self.online.save(temporary)
        replace_file(temporary / "steps.json", json.dumps(self.steps))
        if state.exists():
            state.rename(self.folder / f"state-{len(self.steps) - SAVED_EVERY}")
        temporary.rename(state)


def draw(folder: Path) -> Path:
    """Draw tokens per call over the steps of the policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = json.loads((folder / "online.json").read_text(encoding="utf-8"))["steps"]
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for name, style in (("static", "--"), ("online", "-")):
        values = torch.tensor([step[name] for step in steps])
        means = [float(values[max(0, end - 5) : end].mean()) for end in range(1, len(values) + 1)]
        axes.plot(range(len(values)), means, style, label=f"{name} drafter")
    axes.set(xlabel="steps of the policy", ylabel="tokens per call and sequence", ylim=(1, None))
    axes.legend()
    return replace_figure(folder / "online.png", figure)


def main() -> None:
    """Run and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True, help="what regenerate wrote")
    parser.add_argument("--folder", type=Path, default=Path("online"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="of a rollout")
    parser.add_argument("--length", type=int, default=128, help="of a row that the policy learns from")
    parser.add_argument("--rate", type=float, default=1e-3, help="of the policy")
    parser.add_argument("--drafter-rate", type=float, default=5e-4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--updates", type=int, default=1)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    Control(arguments).run()
    print(draw(arguments.folder))


if __name__ == "__main__":
    main()
