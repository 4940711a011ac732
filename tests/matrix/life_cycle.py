"""What happens to models apart from `generate`: copies, directories, dtypes, offload, adapters; then they write."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tests.matrix.decoding import DICT, as_plain
from tests.matrix.models import Entry
from tests.models import checkpoint_activations
from tokenahead import AssistantDrafter
from tokenahead.modeling.common.loading import StrictLoadingMixin
from tokenahead.modeling.ptp.generation import ParallelAssistant


def by_its_own_code(thing: Any, folder: Path) -> Any:
    """What the Auto classes make of a saved directory where the package is not installed."""
    if not isinstance(thing, StrictLoadingMixin):
        return reloaded(thing, folder)
    place = folder / str(id(thing))
    thing.save_pretrained(place, remote_code="bundle")
    names = json.loads((place / "config.json").read_text(encoding="utf-8"))["auto_map"]
    kind = get_class_from_dynamic_module(names.get("AutoModelForCausalLM") or names["AutoModel"], place)
    assert kind.__module__.startswith("transformers_modules.")
    return kind.from_pretrained(place).eval()


def same(twin: Entry, entry: Entry) -> None:
    """Writes and drafts the same."""
    assert twin.model is not entry.model and twin.drafts() == entry.drafts()
    assert torch.equal(twin.generate(twin.inputs(3)), entry.text())


def reloaded(thing: Any, folder: Path, **options: Any) -> Any:
    """A model, a directory of heads, an assistant: saved and loaded; what has no weights is copied."""
    if isinstance(thing, ParallelAssistant):
        return ParallelAssistant(reloaded(thing.model, folder, **options))
    if isinstance(thing, AssistantDrafter):
        texts = dict(zip(("tokenizer", "assistant_tokenizer"), thing.tokenizers)) | {"translate": thing.translate}
        return AssistantDrafter(reloaded(thing.model, folder, **options), thing.num_tokens, **texts)
    if not isinstance(thing, nn.Module):
        return copy.deepcopy(thing)
    thing.save_pretrained(folder / str(id(thing)))
    return type(thing).from_pretrained(folder / str(id(thing)), **options).eval()


def halved(thing: Any) -> Any:
    """A copy in bfloat16."""
    twin = copy.deepcopy(thing)
    for module in (twin, getattr(twin, "model", None)):
        if isinstance(module, nn.Module):
            module.bfloat16()
    return twin


def floated(thing: Any) -> Any:
    """The same in float32."""
    for module in (thing, getattr(thing, "model", None)):
        if isinstance(module, nn.Module):
            module.float()
    return thing


class LifeCycleConformance:
    """What happens to models apart from `generate`: copies, directories, dtypes, offload, training; then they write."""

    def test_saved(self, entry: Entry) -> None:
        """So does a directory."""
        with tempfile.TemporaryDirectory() as folder:
            same(entry.through(lambda thing: reloaded(thing, Path(folder))), entry)

    def test_remote_code(self, entry: Entry) -> None:
        """So does the code that travels with the directory, where there is any of ours."""
        with tempfile.TemporaryDirectory() as folder:
            same(entry.through(lambda thing: by_its_own_code(thing, Path(folder))), entry)

    def test_dtype_auto(self, entry: Entry) -> None:
        """A directory in bfloat16 loads as such and runs; its values in float32 write the plain text."""
        with tempfile.TemporaryDirectory() as folder:
            twin = entry.through(lambda thing: reloaded(halved(thing), Path(folder), dtype="auto"))
        assert twin.model.dtype == torch.bfloat16
        assert twin.generate(twin.inputs(3)).shape == entry.text().shape
        exact = twin.through(lambda thing: floated(copy.deepcopy(thing)))
        as_plain(exact, exact.inputs(3))

    def test_offloaded(self, entry: Entry) -> None:
        """A backbone whose weights lie elsewhere between calls."""
        twin = entry.through(copy.deepcopy, lambda model: cpu_offload(copy.deepcopy(model), execution_device="cpu"))
        assert {parameter.device.type for parameter in twin.model.parameters()} == {"meta"}
        assert torch.equal(twin.generate(twin.inputs(3)), entry.text())

    def test_train_mode(self, entry: Entry) -> None:
        """A model that was left in train mode, with checkpointed activations."""
        twin = entry.through(copy.deepcopy)
        checkpoint_activations(twin.model)
        twin.model.train()
        assert torch.equal(twin.generate(twin.inputs(3)), entry.text()) and twin.model.training

    def test_peft(self, entry: Entry) -> None:
        """LoRA on the attention of the backbone changes the text, and drafts follow."""
        torch.manual_seed(0)
        adapter = LoraConfig(r=2, target_modules=[entry.lora_target], init_lora_weights=False)
        twin = entry.through(copy.deepcopy, lambda model: get_peft_model(copy.deepcopy(model), adapter).eval())
        assert not torch.equal(as_plain(twin, twin.inputs(3)), entry.text())
        assert twin.generate(twin.inputs(3), **DICT).speculation.rows_drafts
        with twin.model.disable_adapter():
            assert torch.equal(twin.generate(twin.inputs(3)), entry.text())
