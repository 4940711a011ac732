"""Students of parallel token prediction on a chain for which the best possible drafters can be computed (markov.py).

Students of 0.48 million parameters learn a Markov chain with 25 states: O-PTP (`one_hot`), C-PTP (`categorical`) and
independent prediction, which is O-PTP whose uniforms say nothing. A draft has N tokens; measured is how many of them
are right, on average, before the first wrong one.

"coupled" verifies a draft with the uniforms that it was drafted from. "token" and "block" verify the same drafts as
samples of known distributions. C-PTP's first token is the backbone's, here the chain's own. Best of M draws M vectors
of uniforms and keeps the most central one, which changes no distribution.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass

import torch
from markov import MarkovChain
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from tokenahead import PTPForCausalLM
from tokenahead.generation.tensors.sampling import interval, pick
from tokenahead.generation.tensors.uniforms import best_of
from tokenahead.generation.verification import coupled_acceptance, token_acceptance, verify
from tokenahead.modeling.ptp.embedding import GREEDY
from tokenahead.training.ptp.losses import PTPOptions
from tokenahead.training.ptp.trainer import PTPTrainer

STATES, ALPHA, CONTEXT, LENGTH, BATCH, COMPLETIONS = 25, 0.3, 2, 12, 16, 4


class Deadline(TrainerCallback):
    """Ends training after so many seconds of processor time; the learning rate falls to zero in the last half."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begun = seconds, time.process_time()

    @property
    def share(self) -> float:
        """How much of the time is over."""
        return min((time.process_time() - self.begun) / self.seconds, 1.0)

    def rate(self, step: int) -> float:
        """Factor of the learning rate."""
        return min(1.0, (step + 1) / 50) * min(1.0, 2 * (1 - self.share))

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Stops in time."""
        control.should_training_stop = self.share >= 1


class Texts(torch.utils.data.IterableDataset):
    """Sequences of the chain without end."""

    def __init__(self, chain: MarkovChain, seed: int) -> None:
        self.chain, self.seed = chain, seed

    def __iter__(self):  # noqa: ANN204
        seed = self.seed * 1000 + 17
        while True:
            yield from ({"input_ids": ids} for ids in self.chain.texts(4096, LENGTH, seed))
            seed += 1


def student(
    kind: str, slots: int, features: str, chain: MarkovChain, seed: int, minutes: float, texts: object = None,
    **options: object,
) -> PTPForCausalLM:  # fmt: skip
    """Trains one student, backbone and all, with the chain as its teacher (but for `method="inverse"`)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=STATES, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    variant = "categorical" if kind == "categorical" else "one_hot"
    model = PTPForCausalLM.from_backbone(
        LlamaForCausalLM(config), variant, features=features, projection="mlp", lora_rank=4, num_slots=slots,
        informative=kind != "independent",
    )  # fmt: skip
    model.train_only("all")
    deadline = Deadline(60 * minutes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    defaults = {"loss": "kl" if kind == "categorical" else "ce", "completions": COMPLETIONS, "greedy_share": 0.25}
    chosen = PTPOptions(**defaults | options)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=10**7, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = PTPTrainer(
            model, arguments, options=chosen, teacher=None if chosen.method == "inverse" else chain,
            train_dataset=texts or Texts(chain, seed), optimizers=(optimizer, LambdaLR(optimizer, deadline.rate)),
            callbacks=[deadline],
        )  # fmt: skip
        trainer.train()
    print(f"{kind}, N = {slots}, seed {seed}: {trainer.state.global_step} steps", flush=True)
    return model.eval()


@dataclass
class Drafts:
    """Drafts with the uniforms and distributions that they come from, [B, N] and [B, N, V]; `p` has a row more."""

    tokens: torch.Tensor
    uniforms: torch.Tensor
    q: torch.Tensor | None
    p: torch.Tensor


@torch.no_grad()
def draft(kind: str, model: PTPForCausalLM, chain: MarkovChain, context: torch.Tensor, count: int) -> Drafts:
    """`count` tokens after every context [B, 2], from fresh uniforms."""
    uniforms = torch.rand(len(context), count)
    if kind == "categorical":
        q = chain.rows[context[:, -1:]]
        if count > 1:
            behind = model(context, uniforms=uniforms[:, :-1]).logits[:, CONTEXT:].double().softmax(-1)
            q = torch.cat([q, behind], dim=1)
        tokens = pick(uniforms, q)
    else:
        logits = model(context, uniforms=uniforms).logits[:, CONTEXT:]
        q = None if kind == "one_hot" else logits.double().softmax(-1)
        tokens = logits.argmax(-1) if q is None else pick(uniforms, q)
    return Drafts(tokens, uniforms, q, chain.rows[torch.cat([context[:, -1:], tokens], dim=1)])


def measure(
    kind: str, model: PTPForCausalLM, chain: MarkovChain, contexts: torch.Tensor, count: int
) -> dict[str, float]:
    """Mean number of tokens that are right before the first wrong one, for every rule."""
    found = draft(kind, model, chain, contexts, count)
    result = {"coupled": float(_correct(found)[0].float().mean())}
    if model.config.greedy:
        result["greedy"] = greedy(kind, model, chain, contexts, count)
    if found.q is not None:
        accept, _ = token_acceptance(found.tokens, found.q, found.p)
        result["token"] = float(accept.cumprod(1).sum(1).mean())
        result["block"] = float(verify(found.tokens, found.q, found.p, "block")[0].float().mean())
    return result


@torch.no_grad()
def greedy(kind: str, model: PTPForCausalLM, chain: MarkovChain, contexts: torch.Tensor, count: int) -> float:
    """How many of `count` slots that are asked for the most likely tokens give them, before the first that does not."""
    first = chain.rows[contexts[:, -1]].argmax(-1)[:, None]
    wish = torch.full((len(contexts), count), GREEDY)
    if kind == "categorical":
        behind = model(contexts, uniforms=wish[:, 1:]).logits[:, CONTEXT:].argmax(-1) if count > 1 else first[:, :0]
        tokens = torch.cat([first, behind], dim=1)
    else:
        tokens = model(contexts, uniforms=wish).logits[:, CONTEXT:].argmax(-1)
    likely = chain.rows[torch.cat([contexts[:, -1:], tokens[:, :-1]], dim=1)].argmax(-1)
    return float((tokens == likely).long().cumprod(1).sum(1).float().mean())


def best_of_many(
    kind: str, model: PTPForCausalLM, chain: MarkovChain, contexts: torch.Tensor, count: int, many: int
) -> float:
    """How many tokens of the most central of `many` drafts are right before the first wrong one."""
    few = contexts[: max(16_384 // many, 1)]
    found = draft(kind, model, chain, few.repeat_interleave(many, 0), count)
    correct, picked = _correct(found)
    low, high = interval(picked, found.p[:, :-1])
    positions = ((found.uniforms - low) / (high - low)).unflatten(0, (-1, many))
    correct = correct.unflatten(0, (-1, many))
    return float(correct.gather(1, best_of(positions, correct)[:, None]).float().mean())


def _correct(found: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafted tokens equal the picks of the backbone before the first that differs [B]; the picks [B, N]."""
    uniforms = torch.nn.functional.pad(found.uniforms, (0, 1))
    correct, picked = coupled_acceptance(found.tokens, uniforms, found.p)
    return correct, picked[:, :-1]
