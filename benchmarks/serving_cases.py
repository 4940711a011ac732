"""What `benchmarks/serving.py` serves: directories that this library exports, and what it writes and drafts itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from serving_models import VOCABULARY, backbone, text, train, unsettle, with_modules
from transformers import PreTrainedModel

from tokenahead import DeepSeekMTP, EagleHead, MTPHeads
from tokenahead.generation.backbone.wrapped_models import untyped
from tokenahead.model_cards.export import export, overrides

LENGTHS = (2, 5, 9, 17, 33, 64)
NEW_TOKENS, WINDOW = 48, 4
PROMPTS = [text(1, length, seed=50 + length)[0].tolist() for length in LENGTHS]
OFFICIAL = (
    *("glm4_moe", "deepseek_v3", "glm4_moe_lite", "hy_v3", "ernie4_5_moe", "exaone_moe", "mimo", "mimo_v2_flash"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "exaone4_5", "glm_ocr", "longcat_flash"),
)
LABELS = {"longcat_flash": ", its routing in PyTorch"}
"""What the engine's part replaces."""
_NATIVE = {
    "compilation_config": {"custom_ops": ["none"]},
    "attention_config": {"backend": "CPU_MLA"},
    "speculative_config": {"attention_backend": "CPU_MLA"},
}
"""vLLM 0.32's CPU kernel for interleaved rotary positions is wrong for several heads; its native operator is right. Its
latent attention for CPUs with AMX, which it prefers there, takes no float32; the module is told apart."""
_RECURRENT = {"dtype": "bfloat16", "enable_prefix_caching": False}
"""Its kernel for recurrent layers on CPUs takes no float32, and with cached prefixes it has none."""
_TEXT: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
"""Of models with a tower for images; no images are sent."""
_SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v3": _NATIVE,
    "exaone4_5": _TEXT,
    "glm4_moe_lite": _NATIVE,
    "glm_ocr": _TEXT,
    "longcat_flash": _NATIVE,
    "qwen3_5": _RECURRENT | _TEXT,
    "qwen3_5_moe_text": _RECURRENT,
    "qwen3_5_text": _RECURRENT,
    "qwen3_next": _RECURRENT,
}
PROPOSER = "tokenahead.model_cards.vllm.HeadProposer"


@dataclass
class Case:
    """One engine.

    Attributes:
        name: What is served, and with how many drafted tokens.
        engine: Arguments of vLLM's `LLM`.
        texts: What plain decoding here writes after every prompt.
        drafts: Of every prompt, (length of the text, draft) for every draft made here.
        prompts: The prompts.
        new_tokens: Tokens to write after each.
        sampling: For each prompt, what vLLM's `SamplingParams` takes; none: all are greedy.
        is_alone: Whether every prompt is asked alone, too.
    """

    name: str
    engine: dict[str, Any]
    texts: list[list[int]]
    drafts: list[list[tuple[int, list[int]]]]
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)
    new_tokens: int = NEW_TOKENS
    sampling: list[dict[str, Any]] = field(default_factory=list)
    is_alone: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For the engine's process."""
        return asdict(self)


def expected(model: PreTrainedModel, count: int, **options: Any) -> tuple[list, list]:
    """Texts of plain decoding, and the drafts made on the way where this library speculates."""
    texts, drafts = [], []
    plain = {"use_mtp": False} if isinstance(model, DeepSeekMTP) else {}
    common = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        texts.append(untyped(model).generate(ids, attention_mask=mask, **common, **plain)[0, len(prompt) :].tolist())
        options |= {"num_assistant_tokens": count, "return_dict_in_generate": True}
        out = untyped(model).generate(ids, attention_mask=mask, **common, **options)
        if out.sequences[0, len(prompt) :].tolist() != texts[-1]:
            raise RuntimeError("speculation here does not equal plain decoding: nothing can be compared with it")
        length, made = len(prompt) + 1, []
        for accepted, draft in zip(out.speculation.accepted, out.speculation.drafts):
            made.append((length, list(draft)))
            length += accepted + 1
        drafts.append(made)
    return texts, drafts


class Builder:
    """Trains models once, writes their directories once, and makes cases of them.

    Args:
        folder: Where directories are written.
        steps: Of training.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.modules = lru_cache(lambda name: with_modules(name, steps))
        self.backbone = lru_cache(lambda name, layers=2: self._backbone(name, layers))

    def _backbone(self, name: str, layers: int) -> PreTrainedModel:
        model = backbone(name, self.steps, num_hidden_layers=layers)
        model.save_pretrained(self.folder / f"{name}_{layers}")
        return model

    def official(self, family: str, label: str = "", copies: bool | None = None) -> Iterator[Callable[[int], Case]]:
        """A family with official modules."""
        model, folder = self.modules(family), self.folder / f"{family}{label}"
        special = _SPECIAL.get(family, {})
        model = model.to(torch.bfloat16) if special.get("dtype") == "bfloat16" else model
        export(model, folder, copies=copies)

        def case(count: int) -> Case:
            speculative = {"method": "mtp", "num_speculative_tokens": count} | special.get("speculative_config", {})
            engine = {"model": str(folder), **special, "speculative_config": speculative}
            return Case(f"{family}{label} k={count}", engine, *expected(model, count))

        return case

    def retrofit(self, family: str) -> Callable[[int], Case]:
        """A backbone and a draft directory."""
        model, folder = self.modules(family), self.folder / f"{family}_retrofit"
        export(model, folder)

        def case(count: int) -> Case:
            draft = {"method": "mtp", "model": str(folder / "draft"), "num_speculative_tokens": count}
            engine = {"model": str(folder / "backbone"), "speculative_config": draft, "hf_overrides": overrides(model)}
            return Case(f"{family} retrofit k={count}", engine, *expected(model, count))

        return case

    def heads(self, family: str, label: str, custom: bool, is_slow: bool = False, **options: Any) -> Case:
        """Heads apart from their backbone: in Medusa's layout, or in our own for `HeadProposer`.

        Independent heads that share the backbone's unembedding learn slowly, and are wrong often enough without noise.
        """
        layers = 2
        base = self.backbone(family, layers)
        torch.manual_seed(0)
        heads: MTPHeads = MTPHeads.from_backbone(base, window=WINDOW, **options)
        heads = train(heads, 8 * self.steps) if is_slow else unsettle(train(heads, self.steps))
        folder = self.folder / f"{family}_{label}_{custom}".replace(" ", "_")
        if custom:
            heads.save_pretrained(folder)
        else:
            heads.export(folder, "vllm")
        speculative: dict[str, Any] = {"num_speculative_tokens": WINDOW - 1}
        speculative |= (
            {"method": "custom_class", "model": PROPOSER} if custom else {"method": "medusa", "model": str(folder)}
        )
        engine: dict[str, Any] = {"model": str(self.folder / f"{family}_{layers}"), "speculative_config": speculative}
        if custom:
            engine["additional_config"] = {"tokenahead_heads": str(folder)}
        kind = "proposer" if custom else "medusa layout"
        found = expected(base, WINDOW - 1, assistant_model=heads)
        heads.detach()
        return Case(f"{family} {label} ({kind})", engine, *found)

    def eagle(self, version: int, label: str = "", layers: int = 4, **options: Any) -> Callable[[int], Case]:
        """A trained EAGLE head."""
        base = self.backbone("llama", layers)
        torch.manual_seed(0)
        options |= {"aux_layers": [1, 2, 3]} if version == 3 else {}  # three states that differ
        head = unsettle(train(EagleHead.from_backbone(base, version=version, **options), self.steps)).detach()
        folder = self.folder / f"eagle{version}{label.replace(' ', '_')}"
        head.export(folder, layout="vllm")
        method = "eagle" if version == 1 else "eagle3"

        def case(count: int) -> Case:
            speculative = {"method": method, "model": str(folder), "num_speculative_tokens": count}
            engine = {"model": str(self.folder / f"llama_{layers}"), "speculative_config": speculative}
            found = expected(base, count, assistant_model=head.attach(base))
            head.detach()
            return Case(f"EAGLE-{version}{label} k={count}", engine, *found)

        return case


def cases(builder: Builder) -> dict[str, Callable[[], list[Case]]]:
    """Groups of cases by name; a group shares its directories."""

    def both(make: Callable[[int], Case], counts: tuple[int, ...] = (1, 3)) -> list[Case]:
        return [make(count) for count in counts]

    groups: dict[str, Callable[[], list[Case]]] = {
        "glm4_moe without copies": lambda: both(builder.official("glm4_moe", " without copies", copies=False), (1,)),
    }
    for family in OFFICIAL:
        groups[family] = lambda family=family: both(builder.official(family, LABELS.get(family, "")))
    for family in ("llama", "mistral", "qwen3", "qwen2"):
        groups[f"{family} retrofit"] = lambda family=family: both(builder.retrofit(family))
    groups["heads as medusa"] = lambda: [
        builder.heads("llama", "ff full", False, unembedding="own"),
        builder.heads("llama", "ff shared", False, is_slow=True),
        builder.heads("llama", "medusa", False, head_type="medusa", unembedding="own"),
        builder.heads("llama", "medusa shared", False, is_slow=True, head_type="medusa"),
    ]
    groups["heads through the proposer"] = lambda: [
        builder.heads("llama", "ff", True, is_slow=True),
        builder.heads("llama", "cp", True, head_type="cp", rank=4),
        builder.heads("llama", "hmm", True, head_type="hmm", rank=4),
        builder.heads("llama", "btree", True, head_type="btree", rank=4),
        builder.heads("qwen3", "btree full", True, head_type="btree", rank=4, unembedding="own"),
        builder.heads("gemma2", "cp", True, head_type="cp", rank=4),
    ]
    most = torch.arange(VOCABULARY)[torch.arange(VOCABULARY) % 8 > 0]
    groups["eagle"] = lambda: [
        *both(builder.eagle(1)),
        *both(builder.eagle(3)),
        builder.eagle(3, " of 112 tokens", draft_ids=most)(3),
    ]
    return groups
