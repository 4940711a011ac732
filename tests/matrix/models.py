"""Every model of the matrix: a tiny backbone and what drafts for it, under one interface."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.backbones import backbone as random_backbone
from tests.backbones import prompts, train_eagle, train_heads
from tests.models import left_padded, trained_model
from tests.ptp_models import backbone as small_backbone
from tests.ptp_models import student
from tests.two_tokenizers import speaker, tokenizer
from tokenahead import (
    AssistantDrafter,
    BlockDrafter,
    DeepSeekMTP,
    DrafterCascade,
    EagleHead,
    EvaByteTokenizer,
    LookaheadDrafter,
    MTPHeads,
    NgramDrafter,
    PTPStudent,
    RecyclingDrafter,
    SuffixDrafter,
)
from tokenahead.modeling.ptp.generation import ParallelAssistant
from tokenahead.testing import letters

DEEPSEEK = Path(__file__).parents[1] / "data" / "deepseek_mtp" / "dsv3_d2_trained"
BLOCK = Path(__file__).parents[1] / "data" / "block"
NEW_TOKENS = 16
HEADS_TREE = {"top_k": 3, "total_tokens": 12}
EAGLE_TREE = {"depth": 3, "top_k": 2, "total_tokens": 12}
_SIZES = dict(
    vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=128, initializer_range=0.3,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8,
        tie_word_embeddings=False,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip


@dataclass
class Entry:
    """A backbone, the drafter that is attached to it (None: it drafts for itself), and what tests ask of them.

    Attributes:
        tree: A `draft_tree` that the drafter takes, if it drafts trees.
        longest: Of drafts, every number up to this is accepted.
    """

    name: str
    model: Any
    drafter: Any = None
    tokenizer: Any = None
    lora_target: str = "o_proj"
    tree: Any = None
    longest: int = 3
    texts: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.model.config.get_text_config().vocab_size

    def inputs(self, rows: int = 1, even: bool = False) -> dict[str, torch.Tensor]:
        """Prompts of several lengths, left-padded (or of one length)."""
        generator = torch.Generator().manual_seed(11)
        lengths = [7] * rows if even else [7, 3, 15, 11][:rows]
        return left_padded([torch.randint(3, self.vocabulary, (n,), generator=generator) for n in lengths])

    def prompts(self, count: int) -> list[torch.Tensor]:
        """Prompts of 1 to 20 tokens."""
        return prompts(count, self.vocabulary)

    def generate(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """Speculates; where that cannot be, an error says so."""
        assistant = {} if self.drafter is None else {"assistant_model": self.drafter}
        return self.model.generate(**(_DEFAULTS | inputs | {"use_mtp": True} | assistant | options))

    def plain(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        """Decodes one token at a time, without the drafter."""
        off = {"use_mtp": False} if self.drafter is None else {}
        return self.model.generate(**(_DEFAULTS | inputs | off | options))

    def text(self, rows: int = 3) -> torch.Tensor:
        """The plain greedy text of `inputs(rows)`, which many tests compare with."""
        if rows not in self.texts:
            self.texts[rows] = self.plain(self.inputs(rows))
        return self.texts[rows]

    def drafts(self, rows: int = 3) -> list[list[list[int]]]:
        """What is drafted for every row."""
        return self.generate(self.inputs(rows), return_dict_in_generate=True).speculation.rows_drafts

    def through(self, change: Callable[[Any], Any], backbone: Callable[[Any], Any] | None = None) -> Entry:
        """The entry made of a changed copy of the drafter and of the backbone (`backbone`, if it changes otherwise)."""
        model = (backbone or change)(self.model)
        drafter = None if self.drafter is None else change(self.drafter).attach(model)
        return Entry(self.name, model, drafter, self.tokenizer, self.lora_target, self.tree, self.longest)


_DEFAULTS = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)


def evabyte(head_type: str, name: str = "", **options: Any) -> Entry:
    """The trained golden model with another head; a circuit starts from the trained FF heads."""
    model = trained_model()
    if head_type != "ff":
        torch.manual_seed(0)
        model.set_head(head_type=head_type, window=5, rank=2, **options)
        with torch.no_grad():  # its states are alike at first, which would make it an FF head
            for parameter in model.mtp_head.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    longest = 7 if head_type == "ff" else 4
    name = f"evabyte-{name or head_type}"
    return Entry(name, model.eval(), None, EvaByteTokenizer(), tree=HEADS_TREE, longest=longest)


def backbone(family: str) -> Any:
    """A random model of a family of transformers."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    model.generation_config.pad_token_id = 0
    return model


def _attached(name: str, model: Any, drafter: Any, **options: Any) -> Entry:
    tokenizer = letters(model.config.vocab_size)
    return Entry(name, model, drafter.attach(model), tokenizer, **options)


def practised(model: Any, drafter: Any, rate: float) -> Any:
    """The drafter, trained for a moment on what the backbone writes, so that some drafts are right."""
    starts = torch.randint(3, 48, (32, 4), generator=torch.Generator().manual_seed(0))
    text = model.generate(starts, max_new_tokens=24, do_sample=False)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=rate)
    for _ in range(60):
        drafter(text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def heads(family: str, name: str = "heads", lora_target: str = "o_proj", **options: Any) -> Entry:
    """FF heads, or those of the options, apart from their backbone."""
    model = backbone(family)
    drafter = practised(model, MTPHeads.from_backbone(model, window=4, unembedding="own", **options), 3e-2)
    return _attached(f"{name}-{family}", model, drafter, tree=HEADS_TREE, lora_target=lora_target)


def eagle() -> Entry:
    """An EAGLE-3 head."""
    model = backbone("llama")
    torch.manual_seed(1)
    return _attached("eagle-llama", model, practised(model, EagleHead.from_backbone(model), 1e-2), tree=EAGLE_TREE)


def block() -> Entry:
    """A trained golden of DFlash, a block of five tokens, a causal layer with a window and one that sees all."""
    model = AutoModelForCausalLM.from_pretrained(BLOCK / "llama", dtype=torch.float32).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    drafter = BlockDrafter.from_pretrained(BLOCK / "zlab_llama", dtype=torch.float32).eval()
    drafter.config.layout = "tokenahead"
    return _attached("block-llama", model, drafter, tree=EAGLE_TREE)


def eagle1(family: str) -> Entry:
    """An EAGLE-1 head."""
    model = random_backbone(family)
    return _attached(f"eagle1-{family}", model, train_eagle(model, 1), tree=EAGLE_TREE, longest=5)


def deepseek() -> Entry:
    """The golden checkpoint with two trained modules."""
    model = DeepSeekMTP.from_pretrained(DEEPSEEK, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = letters(model.config.vocab_size)
    return Entry("deepseek-modules", model, None, tokenizer, tree=EAGLE_TREE, longest=2)


def ptp(variant: str, seed: int = 2) -> Entry:
    """A student whose adapters do something."""
    model = student(variant, small_backbone(seed=seed)).eval()
    tokenizer = letters(model.config.get_text_config().vocab_size)
    return Entry(f"ptp-{variant}", model, None, tokenizer, longest=2 if variant == "one_hot" else 3)


def ptp_student() -> Entry:
    """A student apart from its backbone."""
    model = small_backbone(seed=2)
    return _attached("ptp-student-llama", model, PTPStudent.from_model(student("one_hot", model)).eval(), longest=2)


def ptp_assistant() -> Entry:
    """A model with parallel token prediction, disturbed, drafts for another."""
    model = small_backbone(seed=2)
    small = student("categorical", copy.deepcopy(model)).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in small.backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return _attached("ptp-assistant-llama", model, ParallelAssistant(small), longest=4)


def assistant() -> Entry:
    """A disturbed copy drafts for the model."""
    model = backbone("llama")
    small = copy.deepcopy(model)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    return _attached("assistant-llama", model, AssistantDrafter(small, num_tokens=4), longest=4)


def trained_heads(head_type: str, family: str, **options: Any) -> Entry:
    """Heads of another type than FF, which are smaller than their backbone's head."""
    model = random_backbone(family)
    drafter = train_heads(model, steps=30, unembedding=None, head_type=head_type, **options)
    return _attached(f"{head_type}-{family}", model, drafter, tree=HEADS_TREE)


def translation() -> Entry:
    """An assistant whose tokenizer is another one."""
    both = {"tokenizer": tokenizer(64), "assistant_tokenizer": tokenizer(46)}
    model, small = copy.deepcopy(speaker("llama", 64)), speaker("llama", 46, "bytes", 40)
    return _attached("translation-llama", model, AssistantDrafter(small, 4, **both, translate="text"), longest=4)


def look_ups_before_heads() -> Entry:
    """A cascade."""
    model = random_backbone("qwen3")
    drafter = DrafterCascade([SuffixDrafter(factor=2.0), train_heads(model, steps=10).detach()])
    return _attached("cascade-qwen3", model, drafter, tree={"depth": 2, "top_k": 2, "total_tokens": 8})


_MAKE: dict[str, Callable[[], Entry]] = {
    "evabyte-ff": lambda: evabyte("ff"),
    "evabyte-cp": lambda: evabyte("cp"),
    "evabyte-hmm": lambda: evabyte("hmm"),
    "evabyte-btree": lambda: evabyte("btree"),
    "evabyte-context": lambda: evabyte("hmm", "context", context=3, transition_context=True, leaf_size=8),
    "heads-llama": lambda: heads("llama"),
    "heads-gemma3": lambda: heads("gemma3"),
    "heads-gpt2": lambda: heads("gpt2", lora_target="c_attn"),
    "context-llama": lambda: heads("llama", "context", context=2, context_rank=8),
    "eagle-llama": eagle,
    "block-llama": block,
    "deepseek-modules": deepseek,
    "ptp-one_hot": lambda: ptp("one_hot"),
    "ptp-categorical": lambda: ptp("categorical"),
    "ptp-mask": lambda: ptp("mask", seed=6),  # a sampler head at random, and some of its drafts are right
    "eagle1-mistral": lambda: eagle1("mistral"),
    "medusa-llama": lambda: trained_heads("medusa", "llama"),
    "hydra-qwen3": lambda: trained_heads("hydra", "qwen3"),
    "layer-mistral": lambda: trained_heads("layer", "mistral"),
    "ngram-llama": lambda: _attached(
        "ngram-llama", backbone("llama"), NgramDrafter(num_tokens=5), tree={"top_k": 3}, longest=5
    ),
    "ngram-tree-llama": lambda: _attached(
        "ngram-tree-llama", backbone("llama"), NgramDrafter(num_tokens=3, branches=3), tree={"top_k": 2}
    ),
    "suffix-mistral": lambda: _attached(
        "suffix-mistral", random_backbone("mistral"), SuffixDrafter(factor=2.0), tree=HEADS_TREE
    ),
    "recycling-qwen3": lambda: _attached(
        "recycling-qwen3", random_backbone("qwen3"), RecyclingDrafter(4, num_tokens=4, total_tokens=16), tree=HEADS_TREE
    ),
    "lookahead-mistral": lambda: _attached(
        "lookahead-mistral", random_backbone("mistral"), LookaheadDrafter(3, 3, 3), tree=None
    ),
    "cascade-qwen3": look_ups_before_heads,
    "translation-llama": translation,
    "assistant-llama": assistant,
    "ptp-student-llama": ptp_student,
    "ptp-assistant-llama": ptp_assistant,
}
NAMES = list(_MAKE)


@cache
def entry(name: str) -> Entry:
    """The entry of that name, made once; tests that change a model change a copy."""
    return _MAKE[name]()
