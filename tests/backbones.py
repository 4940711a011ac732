"""Small plain backbones of transformers, text of theirs, and heads that learned it; several tests share them."""

import copy
from functools import cache
from hashlib import sha256

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from tests.models import left_padded
from tokenahead import EagleHead, EvaByteConfig, MTPHeads

_SIZES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=256, initializer_range=0.15,
)  # fmt: skip
_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
ATTENTION_WINDOW = 6
"""Of the backbones with sliding windows: shorter than every text."""


_GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.15)
_EVABYTE = _SIZES | dict(num_attention_heads=2, num_pred_heads=1, window_size=9, chunk_size=3, initializer_range=0.2)
_KINDS = dict(layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8)
CONFIGS = {
    "llama": (LlamaConfig, _SIZES),
    "qwen3": (Qwen3Config, _SIZES),
    "mistral": (MistralConfig, _SIZES | dict(sliding_window=ATTENTION_WINDOW)),
    "gemma3": (Gemma3TextConfig, _SIZES | _KINDS | dict(sliding_window=ATTENTION_WINDOW)),
    "gpt2": (GPT2Config, _GPT2),
    "evabyte": (EvaByteConfig, {k: v for k, v in _EVABYTE.items() if k not in ("num_key_value_heads", "head_dim")}),
}


def backbone(name: str = "llama", vocabulary: int = 48, seed: int = 1) -> PreTrainedModel:
    """A random model that never ends a text by itself."""
    torch.manual_seed(seed)
    config, sizes = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(config(vocab_size=vocabulary, **sizes, **_IDS)).eval()
    model.generation_config.eos_token_id = None
    return model


def word_tokenizer(vocabulary: int = 48) -> PreTrainedTokenizerFast:
    """Every id is a separate word."""
    names = {f"w{i}.": i for i in range(vocabulary - 1)} | {"abcdef": vocabulary - 1}  # `StopStringCriteria` wants it
    words = Tokenizer(models.WordLevel(names, unk_token="w0."))
    words.pre_tokenizer, words.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0.", pad_token="w0.")


def prompts(count: int, vocabulary: int = 48, seed: int = 5) -> list[torch.Tensor]:
    """Random prompts of 1 to 20 tokens, in five lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 4, 7, 12, 20]
    return [torch.randint(2, vocabulary, (lengths[i % 5],), generator=generator) for i in range(count)]


def plain_continuations(model: PreTrainedModel, batch: list[torch.Tensor], new: int, **options) -> list[torch.Tensor]:
    """What plain greedy decoding appends to each prompt; prompts of one length go together, without padding."""
    found: dict[int, torch.Tensor] = {}
    for length in {len(prompt) for prompt in batch}:
        rows = [row for row, prompt in enumerate(batch) if len(prompt) == length]
        ids = torch.stack([batch[row] for row in rows])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options)
        found |= dict(zip(rows, out[:, length:]))
    return [found[row] for row in range(len(batch))]


def check_greedy(model: PreTrainedModel, drafter, batch: list[torch.Tensor], new: int, **options) -> set[int]:
    """Asserts that drafts change nothing, alone and in ragged batches of 4; returns the accepted counts of both."""
    expected = plain_continuations(model, batch, new)
    common = dict(max_new_tokens=new, do_sample=False, assistant_model=drafter, return_dict_in_generate=True) | options
    alone, ragged, uneven, counts = set(), set(), False, []
    for prompt, text in zip(batch, expected):
        drafter.schedules.clear()  # an adaptive length begins with trials, which accept every number of drafts
        out = model.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **common)
        assert out.sequences[0, len(prompt) :].tolist() == text.tolist()
        alone |= set(out.speculation.accepted)
        counts.append(out.speculation.accepted)
    for start in range(0, len(batch), 4):
        group, texts = batch[start : start + 4], expected[start : start + 4]
        drafter.schedules.clear()
        out = model.generate(**left_padded(group), **common)
        assert out.sequences[:, -new:].tolist() == [text.tolist() for text in texts]
        ragged |= set().union(*out.speculation.rows_accepted)
        if options.get("num_assistant_tokens_schedule") != "adaptive":  # near the end of a text drafts are shorter
            for row, own in zip(out.speculation.rows_accepted, counts[start : start + 4]):
                assert row[: len(own) - 2] == own[:-2], "drafts of a row are its own in a batch, too"
        uneven |= len({len(row) for row in out.speculation.rows_accepted}) > 1
    assert uneven, "rows must accept differently, or the batches show nothing"
    assert alone == ragged, (alone, ragged)
    return alone


def train_heads(
    model: PreTrainedModel, window: int = 4, steps: int = 60, unembedding: str | None = "own", **options
) -> MTPHeads:
    """Attached heads that learned text which the model wrote greedily."""
    return taught(MTPHeads.from_backbone(model, window=window, unembedding=unembedding, **options), steps)


def train_eagle(model: PreTrainedModel, version: int, steps: int = 40) -> EagleHead:
    """An attached EAGLE head that learned such text, in three steps of drafting where it is EAGLE-3."""
    options = dict(aux_layers=[0, 1, 2], loss_options={"steps": 3}) if version == 3 else {}
    return taught(EagleHead.from_backbone(model, version=version, **options), steps)


_LEARNED: dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]] = {}
"""The weights of drafters that learned in this run, and the random state afterwards, by what they follow from."""


def taught(drafter, steps: int):
    """The drafter, trained; where all that this follows from was there before, by copying what was learned then."""
    modules = (drafter.backbone, drafter)
    parts = [f"{steps} {[module.config for module in modules]}".encode(), torch.get_rng_state().numpy().tobytes()]
    parts += [value.double().numpy().tobytes() for module in modules for value in module.state_dict().values()]
    known = sha256(b"".join(parts)).hexdigest()
    if known not in _LEARNED:
        _teach(drafter, steps)
        learned = {name: value.detach().clone() for name, value in drafter.named_parameters()}
        _LEARNED[known] = learned, torch.get_rng_state()
    learned, state = _LEARNED[known]
    with torch.no_grad():
        for name, value in drafter.named_parameters():
            value.copy_(learned[name])
    torch.set_rng_state(state)
    return drafter.eval()


def _teach(drafter, steps: int) -> None:
    model = drafter.backbone
    vocabulary = model.config.get_text_config().vocab_size
    starts = torch.randint(2, vocabulary, (24, 3), generator=torch.Generator().manual_seed(3))
    text = model.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=40, do_sample=False)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        drafter(text, labels=text).loss.backward()
        optimizer.step()
    optimizer.zero_grad()


def code(lines: int = 40) -> torch.Tensor:
    """Python that repeats itself, one id per character."""
    names = ["value", "total", "index", "count"]
    text = "".join(
        f"def add_{names[i % 4]}(self, {names[i % 3]}):\n    self.{names[i % 4]} += {names[i % 3]}\n"
        for i in range(lines)
    )
    alphabet = {character: number + 2 for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text])


def code_prompts(count: int) -> list[torch.Tensor]:
    """Cuttings of the code, 6 to 60 characters long in five lengths."""
    text, generator = code(), torch.Generator().manual_seed(9)
    starts = torch.randint(0, len(text) - 60, (count,), generator=generator).tolist()
    return [text[start : start + [6, 20, 33, 47, 60][i % 5]] for i, start in enumerate(starts)]


def learn(model: PreTrainedModel, text: torch.Tensor, steps: int = 80) -> PreTrainedModel:
    """Trains a backbone on cuttings of a text."""
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=5e-3), torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 64, (8,), generator=generator).tolist()
        batch = torch.stack([text[start : start + 64] for start in starts])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    return model.eval()


@cache
def coder(name: str) -> PreTrainedModel:
    """A backbone that writes `code`, taught once in a run: tests detach what they attach and remove their hooks."""
    return learn(backbone(name), code())


def blurred(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A copy whose weights are a little off: an assistant that is often right."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(noise * weight.std(correction=0) * torch.randn(weight.shape, generator=generator))
    return twin


class Reading(torch.nn.Module):
    """A layer that reads from the device."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return self.inner(states) if float(states.abs().amax()) >= 0 else states
