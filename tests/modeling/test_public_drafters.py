"""Rows of docs/public_drafters.md whose config.json was seen load over tensors of the published names, and draft."""

import json
from math import ceil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.benchmark_modules import drafters_table
from tests.eagle_models import tiny_backbone
from tokenahead.modeling.common.loading import drafter_class, read_drafter

DATA = Path(__file__).parents[1] / "data" / "public_drafters"
ROWS = {name: part for part in json.loads(drafters_table.DATA.read_text()) for name in part["configs"]}
WIDTH, HEADS, HEAD_DIM, INNER, VOCABULARY, DRAFTED, LAYERS, TARGET_LAYERS = 32, 4, 8, 48, 96, 48, 2, 8
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def config_of(name):
    return json.loads((DATA / f"{name.split('/')[1]}.json").read_text())


def small(config):
    """The config with the sizes of a test; all other fields stay as they are published.

    Widths, heads (with their ratio to those of keys), layers and vocabularies become the constants above, where a
    config states them; ids of tokens are cut to the vocabulary, and ids of layers stand at the same share of the depth.
    """
    sizes = {"hidden_size": WIDTH, "head_dim": HEAD_DIM, "intermediate_size": INNER, "num_attention_heads": HEADS}
    sizes |= {"vocab_size": VOCABULARY, "draft_vocab_size": DRAFTED, "num_target_layers": TARGET_LAYERS}
    found = config | {key: size for key, size in sizes.items() if key in config}
    if "num_key_value_heads" in config:
        found["num_key_value_heads"] = ceil(HEADS * config["num_key_value_heads"] / config["num_attention_heads"])
    if config.get("num_hidden_layers", 0) > LAYERS:
        found["num_hidden_layers"] = LAYERS
        found |= {"layer_types": config["layer_types"][:LAYERS]} if "layer_types" in config else {}
    if "dflash_config" in config:
        ids = config["dflash_config"]["target_layer_ids"]
        depth = config.get("num_target_layers", ids[-1] + 3)  # z-lab's default ids end three layers before the last
        ids = [
            each * (TARGET_LAYERS - 1) // depth for each in ids
        ]  # the last layer's output is normed in `hidden_states`
        found["dflash_config"] = config["dflash_config"] | {"mask_token_id": VOCABULARY - 1, "target_layer_ids": ids}
    tokens = [key for key in config if key.endswith("_token_id")]
    return found | {key: min(config[key], VOCABULARY - 1) for key in tokens}


def random(*shape):
    return torch.randn(shape) * 0.2


def layer(prefix, config, width=WIDTH, has_bias=False):
    """The tensors of a Llama layer whose attention reads states of a width; of all biases, o_proj has none in EAGLE."""
    keys = config.get("num_key_value_heads", HEADS) * HEAD_DIM
    shapes = {"q_proj": (WIDTH, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (WIDTH, WIDTH)}
    made = {f"{prefix}.self_attn.{name}.weight": random(*shapes[name]) for name in ATTENTION}
    made |= {f"{prefix}.self_attn.{name}.bias": random(shapes[name][0]) for name in ATTENTION if has_bias}
    inner = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
    made |= {f"{prefix}.mlp.{name}.weight": random(*shape) for name, shape in inner.items()}
    return made | {f"{prefix}.post_attention_layernorm.weight": 1 + random(WIDTH)}


def eagle1(config):
    """embed_tokens, fc over embedding and feature (with a bias unless `bias` is false), a layer without input norm."""
    made = {"embed_tokens.weight": random(VOCABULARY, WIDTH), "fc.weight": random(WIDTH, 2 * WIDTH)}
    made |= {"fc.bias": random(WIDTH)} if config.get("bias", True) else {}
    return "pytorch_model.bin", made | layer("layers.0", config)


def eagle3(config):
    """fc over three states, `midlayer` over twice the width, own norms and unembedding, and the draft vocabulary."""
    made = {"fc.weight": random(WIDTH, 3 * WIDTH), "lm_head.weight": random(DRAFTED, WIDTH)}
    made |= {name: 1 + random(WIDTH) for name in ("norm.weight", "midlayer.hidden_norm.weight")}
    made |= {"midlayer.input_layernorm.weight": 1 + random(WIDTH)} | layer("midlayer", config, 2 * WIDTH)
    ids = torch.arange(0, VOCABULARY, VOCABULARY // DRAFTED)
    is_drafted = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    return "pytorch_model.bin", made | {"d2t": ids - torch.arange(DRAFTED), "t2d": is_drafted}


def medusa(config):
    """Five heads of a block and an unembedding each, whatever the config says."""
    made = {}
    for head in range(5):
        made |= {f"{head}.0.linear.weight": random(WIDTH, WIDTH), f"{head}.0.linear.bias": random(WIDTH)}
        made[f"{head}.1.weight"] = random(VOCABULARY, WIDTH)
    return "medusa_lm_head.pt", made


def dflash(config):
    """fc over the target's states, two norms, and layers of Qwen3; the tables are the target's."""
    states = len(config["dflash_config"]["target_layer_ids"])
    made = {"fc.weight": random(WIDTH, states * WIDTH)}
    made |= {name: 1 + random(WIDTH) for name in ("hidden_norm.weight", "norm.weight")}
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}"
        made |= layer(prefix, config, has_bias=config["attention_bias"])
        made |= {f"{prefix}.self_attn.{name}_norm.weight": 1 + random(HEAD_DIM) for name in "qk"}
        made[f"{prefix}.input_layernorm.weight"] = 1 + random(WIDTH)
    return "model.safetensors", made


TENSORS = {"EAGLE-1": eagle1, "EAGLE-3": eagle3, "Medusa-1": medusa, "DFlash": dflash}


@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_a_published_config_is_read_and_drafts(name, tmp_path):
    part, published = ROWS[name], config_of(name)
    config = small(published)
    assert published.keys() == config.keys()
    torch.manual_seed(0)
    file, tensors = TENSORS[part["format"]](config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, tmp_path / file)
    else:
        torch.save(tensors, tmp_path / file)
    base = tiny_backbone(vocab_size=VOCABULARY, num_hidden_layers=TARGET_LAYERS)
    assert drafter_class(tmp_path).__name__ == part["class"]
    drafter = read_drafter(tmp_path, dtype=torch.float32, backbone=base).eval().attach(base)
    if "rms_norm_eps" in published:
        assert drafter.config.rms_norm_eps == published["rms_norm_eps"]
        assert drafter.config.rope_parameters["rope_theta"] == published.get("rope_theta", 10_000.0)
    call = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    prompt = torch.tensor([[11, 12, 13, 11, 12]])
    out = base.generate(prompt, assistant_model=drafter, num_assistant_tokens=3, return_dict_in_generate=True, **call)
    assert out.sequences.equal(base.generate(prompt, **call)) and out.speculation.rows_drafts[0]


def test_every_config_that_was_seen_is_in_the_table():
    files = {path.stem for path in DATA.glob("*.json")}
    assert files == {name.split("/")[1] for name in ROWS} and len(files) == len(ROWS)
    assert all(set(part["in_part"]) <= part["configs"].keys() <= part["drafters"].keys() for part in ROWS.values())
