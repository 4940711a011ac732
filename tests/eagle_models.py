"""EAGLE heads that the official code trained, and stand-ins for the backbones that they were trained on.

The numbers of tests/data/eagle were made by running the official code on tiny models; of each backbone only its tables
and the hidden states of the goldens' sequences are kept.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tokenahead import EagleHead

DATA = Path(__file__).parent / "data" / "eagle"
CASES = ("eagle3_llama", "eagle1_llama", "hass_qwen2")


class RecordedBackbone(nn.Module):
    """Answers with the hidden states that the goldens' backbone had, for the sequences it was asked about.

    Args:
        case: Directory of the goldens.
    """

    def __init__(self, case: str) -> None:
        super().__init__()
        stored = load_file(DATA / case / "backbone.safetensors")
        self.golden = load_file(DATA / case / "golden.safetensors")
        self.config = AutoConfig.for_model(**json.loads((DATA / case / "backbone.json").read_text()))
        self.states = {"": stored["states"], "train_": stored["train_states"]}
        vocab, width = stored["embeddings"].shape
        self.embeddings, self.unembedding = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.embeddings.weight.data = stored["embeddings"]
        self.unembedding.weight.data = stored.get("unembedding", stored["embeddings"])
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def get_input_embeddings(self):
        return self.embeddings

    def get_output_embeddings(self):
        return self.unembedding

    def hidden_states(self, name: str = "") -> tuple:
        """As transformers returns them: the layers that were not recorded are None."""
        depth = self.config.num_hidden_layers
        chosen = [2, depth // 2, depth - 3, depth] if len(self.states[name]) == 4 else [depth]
        found = dict(zip(chosen, self.states[name]))
        return tuple(found.get(index) for index in range(depth + 1))

    def forward(self, input_ids, attention_mask=None, **options):
        name = next(name for name in self.states if torch.equal(self.golden[f"{name}input_ids"], input_ids))
        states = self.hidden_states(name)
        return CausalLMOutputWithPast(logits=self.unembedding(states[-1][:, -1:]), hidden_states=states)


@dataclass
class Case:
    """A golden: its numbers, its head, and the stand-in that the head is attached to."""

    golden: dict
    head: EagleHead
    base: RecordedBackbone


def golden_case(name: str, folder: Path | None = None, **options) -> Case:
    """The head of a case, or the same head from another directory."""
    base = RecordedBackbone(name)
    head = EagleHead.from_pretrained(folder or DATA / name / "official", dtype=torch.float32, **options)
    return Case(base.golden, head.eval().attach(base), base)


def foreign_folder(layout: str, folder: Path) -> Path:
    """The golden EAGLE-3 head in SpecForge's or speculators' layout, renamed by hand."""
    source = DATA / "eagle3_llama"
    tensors = torch.load(source / "official" / "pytorch_model.bin", weights_only=True)
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        tensors["embed_tokens.weight"] = load_file(source / "backbone.safetensors")["embeddings"]
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / f"{layout}.json").read_text())
    return folder


def teacher_forced(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, what rows return, and logits over the golden prompts."""
    with torch.no_grad():
        features = case.head.fuse(case.base.hidden_states())
        ids, mask = case.golden["input_ids"], case.golden["attention_mask"]
        return features, *case.head.step(features[:, :-1], ids[:, 1:], attention_mask=mask[:, :-1])


def tiny_backbone(seed: int = 0, config_class=LlamaConfig, **changes) -> PreTrainedModel:
    """A random Llama of 8 layers that never ends a text by itself."""
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config_class(**(sizes | changes))).eval()
