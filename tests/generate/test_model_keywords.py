"""What a model takes in every forward in addition to ids, mask and positions reaches the forwards of drafts, too."""

import copy
import itertools

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

from tests.backbones import backbone, blurred, prompts, train_eagle, train_heads
from tests.matrix.decoding import warnings_of
from tests.models import left_padded, trained_model
from tokenahead import AssistantDrafter, DeepSeekMTP, EvaByteForMTPC, NgramDrafter
from tokenahead.configuration.cache_names import CACHE

V, NEW = 48, 20
GREEDY = dict(do_sample=False, max_new_tokens=NEW)


def with_bias(out, *biases):
    """Output of a forward whose logits have these added."""
    for bias in biases:
        out.logits = out.logits if bias is None else out.logits + bias
    return out


class Steered(LlamaForCausalLM):
    """Adds `steering` [V], [B, 1, V], or a column per token, and what `names` say, to the logits of every forward."""

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, cache=None, steering=None,
        boost=None, **kwargs,
    ):  # fmt: skip
        kwargs |= dict(attention_mask=attention_mask, position_ids=position_ids)
        kwargs[CACHE] = past_key_values if cache is None else cache
        return with_bias(super().forward(input_ids, **kwargs), steering, boost)


class Adding(Steered):
    """Its own `prepare_inputs_for_generation` adds the same bias to every forward."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, **kwargs) | {"boost": self.bias}


class ByOutputs(Steered):
    """Steers by what the last forward gave, which nobody knows for a draft."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        bias = outputs.logits[:, -1:].roll(3, -1)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs) | {"steering": bias}


def model_of(kind=Steered):
    model = copy.deepcopy(backbone())
    model.__class__ = kind
    generator = torch.Generator().manual_seed(3)
    model.bias = torch.randn(V, generator=generator) * 3
    model.table = torch.randn(V, V, generator=generator) * 3
    model.generation_config.pad_token_id = 0
    return model


def bias(rows, columns=1, scale=3.0):
    return torch.randn(rows, columns, V, generator=torch.Generator().manual_seed(5)) * scale


DRAFTERS = {
    "ngram": lambda model: NgramDrafter(longest=1, num_tokens=4).attach(model),
    "tree": lambda model: NgramDrafter(longest=1, num_tokens=3, branches=3).attach(model),
    "heads": lambda model: train_heads(model, steps=10),
    "eagle": lambda model: train_eagle(model, 1, steps=5),
    "assistant": lambda model: AssistantDrafter(blurred(backbone(), 0.1), num_tokens=4).attach(model),
}


def speculates(model, drafter, batch, shows=True, **keywords):
    """Assert that drafts change nothing, and that they are made (not so: that one warning says why)."""
    plain = model.generate(**batch, **GREEDY, **keywords)
    with warnings_of("tokenahead") as messages:
        out = model.generate(**batch, **GREEDY, **keywords, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    plainly = [message for message in messages if message.startswith("Decoding one token at a time")]
    assert hasattr(out, "speculation") == (not plainly) == shows, plainly
    if not shows:
        with pytest.raises(ValueError, match="use_mtp=True"):
            model.generate(**batch, **GREEDY, **keywords, assistant_model=drafter, use_mtp=True)
    return out


@pytest.mark.by_day("[V]-tree", "[1, 1, V]-eagle", "[B, 1, V]-assistant")
@pytest.mark.core_cases("[B, 1, V]-ngram")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("shape", ["[V]", "[B, 1, V]", "[1, 1, V]"])
def test_a_keyword_of_the_call_reaches_every_forward(drafter, shape):
    model, batch = model_of(), left_padded(prompts(4))
    steering = {"[V]": bias(1)[0, 0], "[B, 1, V]": bias(4), "[1, 1, V]": bias(1)}[shape]
    out = speculates(model, DRAFTERS[drafter](model), batch, steering=steering)
    assert not torch.equal(out.sequences, model.generate(**batch, **GREEDY)), "or the case shows nothing"


def test_it_is_repeated_for_several_texts_of_a_prompt():
    model, batch = model_of(), left_padded(prompts(4))
    drafter, options = DRAFTERS["ngram"](model), dict(steering=bias(4), num_return_sequences=2, max_new_tokens=12)
    texts = []
    for one in (None, drafter):
        torch.manual_seed(0)
        texts.append(model.generate(**batch, **options, do_sample=True, top_k=1, assistant_model=one))
    assert torch.equal(*texts)


@pytest.mark.core
def test_methods_of_a_class_of_ones_own_decode_plainly():
    for kind, drafter in itertools.product([Adding, ByOutputs], ["ngram", "tree"]):
        model = model_of(kind)
        speculates(model, DRAFTERS[drafter](model), left_padded(prompts(4)), shows=False)


@pytest.mark.parametrize("answer", ["dict", "cache"])
def test_a_text_that_ended_long_before_is_whole(answer):
    """Its last token is fed at the end of the call, with the keywords of every forward."""
    model, lengths = model_of(), torch.tensor([8, 15, 40])
    batch = dict(
        input_ids=torch.stack([prompt[:6] for prompt in prompts(5)[2:]]), attention_mask=torch.ones(3, 6).long()
    )
    batch |= dict(stopping_criteria=[lambda ids, scores, **_: ids.shape[1] >= lengths], eos_token_id=V - 1)
    batch |= {"return_dict_in_generate": True} if answer == "dict" else {}
    caches, texts = [DynamicCache(config=model.config) for _ in range(2)], []
    for cache, drafter in zip(caches, ({}, {"assistant_model": DRAFTERS["ngram"](model)})):
        given = {"past_key_values": cache} if answer == "cache" else {}
        out = model.generate(**batch, do_sample=False, max_new_tokens=30, steering=bias(3), **given, **drafter)
        texts.append(out.sequences if answer == "dict" else out)
        caches[len(texts) - 1] = out.past_key_values if answer == "dict" else cache
    assert texts[0].equal(texts[1])
    for row, length in enumerate((texts[0] != 0).sum(1).clamp(max=texts[0].shape[1] - 1).tolist()):
        torch.testing.assert_close(*(cache.layers[1].keys[row, :, :length] for cache in caches))


class SteeredEvaByte(EvaByteForMTPC):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, steering=None, **kwargs):
        kwargs |= dict(attention_mask=attention_mask, position_ids=position_ids)
        return with_bias(super().forward(input_ids, **kwargs), steering)


class SteeredModules(DeepSeekMTP):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, steering=None, **kwargs):
        kwargs |= dict(attention_mask=attention_mask, position_ids=position_ids)
        return with_bias(super().forward(input_ids, **kwargs), steering)


def test_models_that_draft_for_themselves_hand_it_on():
    for kind in [SteeredEvaByte, SteeredModules]:
        if kind is SteeredEvaByte:
            model = copy.deepcopy(trained_model())
        else:
            from tests.families import family_model

            model = family_model("deepseek_v3")
            model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        model.__class__ = kind
        size = model.config.get_text_config().vocab_size
        steering = torch.randn(2, 1, size, generator=torch.Generator().manual_seed(0)) * 2
        batch = left_padded([torch.arange(70, 79), torch.arange(70, 84)])
        plain = model.generate(**batch, **GREEDY, steering=steering, use_mtp=False)
        got = model.generate(**batch, **GREEDY, steering=steering, use_mtp=True)
        assert torch.equal(got, plain)
        assert not torch.equal(plain, model.generate(**batch, **GREEDY, use_mtp=False))


@pytest.mark.by_day("20-tree")
@pytest.mark.parametrize("drafter", ["ngram", "tree", "heads"])
@pytest.mark.parametrize("columns", [5, 20])
def test_states_of_an_encoder_are_attended_to_in_every_forward(drafter, columns):
    """Also where an encoder's text happens to be as long as the prompt (20)."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)
    model = GPT2LMHeadModel(GPT2Config(add_cross_attention=True, **sizes)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    batch, states = left_padded(prompts(5)), torch.randn(5, columns, 32) * 3
    made = DRAFTERS[drafter](model)
    out = speculates(model, made, batch, encoder_hidden_states=states)
    assert not torch.equal(out.sequences, model.generate(**batch, **GREEDY))
    speculates(model, made, batch)


def test_positions_that_a_model_counts_from_one():
    for drafter, shows in itertools.product(["ngram", "tree"], ["image", "text"]):
        torch.manual_seed(1)
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        text = dict(
            model_type="gemma", vocab_size=64, num_key_value_heads=2, head_dim=8, initializer_range=0.3, bos_token_id=1,
            eos_token_id=None, pad_token_id=0, **sizes,
        )  # fmt: skip
        vision = dict(model_type="siglip_vision_model", image_size=16, patch_size=8, projection_dim=32, **sizes)
        config = PaliGemmaConfig(
            text_config=text, vision_config=vision, image_token_index=60, projection_dim=32, hidden_size=32
        )
        model = PaliGemmaForConditionalGeneration(config).eval()
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        image = [60] * 4 * (shows == "image")
        batch = left_padded([torch.tensor([*image, 5, 6, 7, 8, 9, 5, 6]), torch.tensor([*image, 9, 8, 7, 6])])
        if image:
            batch |= dict(pixel_values=torch.randn(2, 3, 16, 16), token_type_ids=torch.zeros_like(batch["input_ids"]))
        speculates(model, DRAFTERS[drafter](model), batch)


def test_virtual_tokens_of_peft_decode_plainly():
    """peft prepares the inputs of such a call instead of the model."""
    for kind in [PromptTuningConfig, PrefixTuningConfig]:
        adapted = get_peft_model(model_of(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
        drafter = NgramDrafter(longest=1, num_tokens=4).attach(adapted)
        for batch in (left_padded(prompts(4)), dict(input_ids=prompts(4)[3][None])):
            speculates(adapted, drafter, batch, shows=False)


def test_pictures_among_the_layers_of_the_cache_decode_plainly():
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    text = dict(
        vocab_size=48, num_key_value_heads=1, cross_attention_layers=[1], initializer_range=0.3, pad_token_id=0,
        rope_parameters=dict(rope_type="default", rope_theta=1e4), **sizes,
    )  # fmt: skip
    vision = dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_global_layers=1, attention_heads=2,
        image_size=16, patch_size=8, max_num_tiles=1, intermediate_layers_indices=[0], vision_output_dim=32,
        supported_aspect_ratios=[[1, 1]],
    )  # fmt: skip
    model = MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=vision, image_token_index=47))
    model.eval().generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    drafter, one = NgramDrafter(longest=1, num_tokens=4).attach(model), torch.ones(2, 1, dtype=torch.long)
    batch = left_padded([torch.tensor([47, 5, 6, 7, 8, 5]), torch.tensor([47, 9, 8, 9])])
    seen = dict(cross_attention_mask=batch["attention_mask"][..., None, None])
    image = dict(pixel_values=torch.randn(2, 1, 1, 3, 16, 16), aspect_ratio_ids=one, aspect_ratio_mask=one[:, None])
    speculates(model, drafter, batch | image | seen, shows=False)
    speculates(model, drafter, left_padded(prompts(4, 47)))
