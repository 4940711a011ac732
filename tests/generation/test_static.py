"""`cache_implementation="static"`: drafts are verified in room of one size, by graphs that are compiled once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig

from tests.backbones import CONFIGS, backbone, prompts, train_eagle, train_heads
from tests.families import CHUNKED, family_config, shake
from tests.models import left_padded
from tests.ptp_models import VOCABULARY, student
from tests.tree_drafters import KnowingChains, KnowingTrees
from tokenahead import NgramDrafter
from tokenahead.generation.backbone import cache as cache_module

NEW = 24
GREEDY = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
STATIC = dict(cache_implementation="static", use_mtp=True, return_dict_in_generate=True)
NAMES = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "gpt_oss"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled():
    """What compiles whole forwards on processors, too; the tracer is what is tested."""
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    return config


def model_of(name):
    if name in CONFIGS:
        return backbone(name).double()
    torch.manual_seed(3)
    return shake(AutoModelForCausalLM.from_config(family_config(name, vocab_size=48))).eval()


def graphs():
    """How many graphs were made since this was last asked."""
    found = counters["stats"]["unique_graphs"]
    counters.clear()
    return found


def decoded(model, drafter, seed, **options):
    """What a ragged batch accepts, after its text was compared with that of plain decoding."""
    batch = left_padded(prompts(4, seed=seed))
    plain = model.generate(**batch, **GREEDY)
    drafter.texts = plain.tolist()
    graphs()
    out = model.generate(**batch, **GREEDY, **STATIC, assistant_model=drafter, **options)
    assert torch.equal(out.sequences, plain)
    return set().union(*out.speculation.rows_accepted)


@pytest.mark.by_day("gemma3-chains")
@pytest.mark.core_cases("gpt2-chains")
@pytest.mark.parametrize("kind", [KnowingChains, KnowingTrees], ids=["chains", "trees"])
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_verifies_the_blocks_of_all_calls(name, kind, monkeypatch):
    monkeypatch.setattr(cache_module, "_STEP", 4)  # rings are gone through several times
    model, options = model_of(name), {"compile_config": compiled()}
    drafter = kind(48).attach(model)
    accepted = decoded(model, drafter, 5, num_assistant_tokens=4, **options)
    assert graphs() == 1
    accepted |= decoded(model, drafter, 6, num_assistant_tokens=4, **options)
    assert graphs() == 0 and accepted == {0, 1, 2, 3, 4}


@pytest.mark.by_day("grown tree")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (train_heads, {}),
        (train_heads, {"assistant_confidence_threshold": 0.6}),
        (train_heads, {"draft_tree": [(0,), (1,), (0, 0), (0, 1), (1, 0)]}),
        (lambda model: train_eagle(model, 3), {}),
        (lambda model: train_eagle(model, 1), {"draft_tree": {"depth": 2, "top_k": 2, "total_tokens": 5}}),
        (lambda model: NgramDrafter(longest=1, num_tokens=4).attach(model), {}),
    ],
    ids=["heads", "unsure heads", "fixed tree", "eagle", "grown tree", "ngrams"],
)
def test_every_drafter_drafts_for_a_compiled_forward(make, options):
    model = backbone()
    drafter = make(model)
    accepted = decoded(model, drafter, 5, compile_config=compiled(), **options)
    assert graphs() == 1
    accepted |= decoded(model, drafter, 6, compile_config=compiled(), **options)
    assert graphs() == 0 and len(accepted) > 1


def test_calls_of_two_threads_share_no_buffer():
    model, batches = model_of("llama"), [left_padded(prompts(4, seed=seed)) for seed in (5, 6)]
    drafter, options = NgramDrafter(longest=1).attach(model), GREEDY | STATIC | dict(compile_config=compiled())
    plain = [model.generate(**batch, **GREEDY) for batch in batches]
    model.generate(**batches[0], **options, assistant_model=drafter)  # compiles
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(model.generate, **batch, **options, assistant_model=drafter) for batch in batches * 3]
        texts = [run.result().sequences for run in runs]
    assert all(map(torch.equal, texts, plain * 3))


def test_drafts_stop_at_the_end_of_a_table_of_positions():
    model, prompt = model_of("gpt2"), torch.randint(2, 48, (1, 240))
    plain = model.generate(prompt, **GREEDY | dict(max_new_tokens=17))
    drafter = NgramDrafter(longest=1, num_tokens=8).attach(model)
    options = GREEDY | STATIC | dict(max_new_tokens=17, compile_config=compiled(), assistant_model=drafter)
    assert torch.equal(model.generate(prompt, **options).sequences, plain) and graphs() == 1


@pytest.mark.by_day("quadratic")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),
        ({}, {"slot_budget": "quadratic"}),
        ({}, {"slot_budget": "linear", "num_assistant_tokens": 2}),
        ({"variant": "categorical"}, {}),
        ({"variant": "mask", "sampler": "mlp"}, {}),
    ],
    ids=["one-hot", "quadratic", "linear", "categorical", "sampler"],
)
def test_slots_ride_along_in_one_graph(model, options):
    model, options = student(**model), options | {"compile_config": compiled()}
    accepted = set()
    for seed, number in ((5, 1), (6, 0)):
        batch = left_padded(prompts(4, VOCABULARY, seed=seed))
        plain = model.generate(**batch, **GREEDY, use_mtp=False)
        graphs()
        out = model.generate(**batch, **GREEDY, **STATIC, **options)
        assert torch.equal(out.sequences, plain) and graphs() == number
        accepted |= set().union(*out.speculation.rows_accepted)


SIZES = dict(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
WINDOWED = {
    "mistral": dict(sliding_window=6),
    "starcoder2": dict(sliding_window=6),
    "phi3": dict(sliding_window=6),
    "qwen2": dict(use_sliding_window=True, sliding_window=6, max_window_layers=0),
    "llama4_text": CHUNKED | dict(layer_types=["chunked_attention"] * 2),
}


@pytest.mark.by_day("mistral-trees")
@pytest.mark.parametrize("kind", [KnowingChains, KnowingTrees], ids=["chains", "trees"])
@pytest.mark.parametrize("name", WINDOWED)
def test_texts_leave_the_window_that_all_layers_have(name, kind, monkeypatch):
    """transformers' own cache has room for the window alone; the text has its own."""
    monkeypatch.setattr(cache_module, "_STEP", 4)  # rings are gone through several times
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **SIZES | WINDOWED[name])
    model = shake(AutoModelForCausalLM.from_config(config)).double().eval()
    drafter = kind(48).attach(model)
    accepted = decoded(model, drafter, 5, num_assistant_tokens=4) | decoded(model, drafter, 6, num_assistant_tokens=4)
    assert accepted == {0, 1, 2, 3, 4}
    options, prompt = GREEDY | STATIC | dict(max_new_tokens=9), torch.randint(2, 48, (1, 11))
    plain = model.generate(prompt, **GREEDY | dict(max_new_tokens=9))
    drafter.texts = plain.tolist()
    embeds = model.get_input_embeddings()(prompt)
    assert torch.equal(model.generate(prompt, assistant_model=drafter, **options).sequences, plain)
    out = model.generate(inputs_embeds=embeds, assistant_model=NgramDrafter().attach(model), **options)
    assert torch.equal(out.sequences, plain[:, 11:])
