"""Public directories of parallel heads: goldens, names, round trips through every layout, and what is refused."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.modeling.heads.backbones import GOLDENS, KINDS, backbone, shaken
from tokenahead import MTPHeads

IDS = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(2, 64, (2, 9, 4), generator=torch.Generator().manual_seed(1))


def golden(name):
    """The backbone, its heads, both read from public layouts, and what their authors' code makes of them."""
    folder = GOLDENS / name
    base = (
        AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
        if (folder / "base").is_dir()
        else MTPHeads.backbone_from_official(folder / "official")
    )
    base.generation_config.eos_token_id = None
    return base, MTPHeads.from_official(folder / "official").attach(base), load_file(folder / "golden.safetensors")


def made(kind, **changes):
    base = backbone()
    return base, shaken(MTPHeads.from_backbone(base, window=4, **(KINDS[kind] | changes))).eval()


@torch.no_grad()
def distribution_of(heads):
    return heads.distribution(IDS).conditional_log_probs(TOKENS)


@pytest.mark.core_cases("hydra_mlp")
@pytest.mark.parametrize("name", ["hydra_mlp", "gloeckle"])
def test_distributions_losses_and_gradients_are_the_authors(name):
    base, heads, gold = golden(name)
    mask = gold["attention_mask"]
    with torch.no_grad():
        distribution = heads.distribution(gold["input_ids"], attention_mask=mask).conditional_log_probs(
            gold["law_tokens"]
        )
    real = mask[:, ::3].bool()
    torch.testing.assert_close(distribution[:, ::3][real], gold["law_log_probs"][real], atol=1e-3, rtol=0)
    out = heads(gold["input_ids"], attention_mask=mask, labels=gold["labels"])
    torch.testing.assert_close(out.head_losses, gold["head_losses"], atol=1e-3, rtol=0)
    out.loss.backward()
    norm = torch.cat([p.grad.flatten() for p in heads.parameters()]).norm()
    torch.testing.assert_close(norm, gold["grad_norm"][0], rtol=5e-3, atol=0)
    assert all(parameter.grad is None for parameter in base.parameters())
    if "teacher_losses" in gold:
        heads.config.loss_target = "teacher"
        taught = heads(gold["input_ids"], attention_mask=mask, labels=gold["labels"]).head_losses
        torch.testing.assert_close(taught[1:], gold["teacher_losses"][1:], atol=1e-3, rtol=0)


@pytest.mark.by_day("hydra_mlp")
@pytest.mark.parametrize("name", ["hydra_mlp", "gloeckle"])
def test_greedy_decoding_accepts_what_the_authors_loop_accepts(name):
    base, heads, gold = golden(name)
    ids, mask = gold["prompt_ids"], gold["prompt_mask"]
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0, assistant_model=heads)
    out = base.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), return_dict_in_generate=True, **options)
    assert out.sequences[0, 9:].tolist() == gold["greedy_ids"][0].tolist()
    assert list(out.speculation.accepted)[: len(gold["accepted"])] == gold["accepted"].tolist()
    assert [list(draft) for draft in out.speculation.drafts][: len(gold["drafts"])] == gold["drafts"].tolist()
    both = base.generate(ids, attention_mask=mask, **options)
    assert torch.equal(both[:, 9:], gold["greedy_ids"])


@pytest.mark.by_day("medusa-own-vllm-changes1", "hydra-hydra-changes3", "layer-gloeckle-changes5")
@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        ("medusa-own", "medusa", {}),
        ("medusa-own", "vllm", {}),
        ("medusa", "vllm", {"num_blocks": 2}),
        ("hydra", "hydra", {"unembedding": "own", "num_blocks": 3, "tied_blocks": True}),
        ("hydra++", "hydra", {"num_blocks": 2}),
        ("layer", "gloeckle", {}),
    ],
)
def test_a_layout_reads_back_what_it_wrote(kind, layout, changes, tmp_path):
    base, heads = made(kind, **changes)
    heads.export(tmp_path, layout)
    again = MTPHeads.from_official(tmp_path)
    assert again.config.num_blocks == heads.config.num_blocks
    assert again.config.tied_blocks == heads.config.tied_blocks
    torch.testing.assert_close(distribution_of(again.attach(base)), distribution_of(heads), atol=1e-5, rtol=0)
    if layout == "gloeckle":
        whole = MTPHeads.backbone_from_official(tmp_path)
        torch.testing.assert_close(whole(IDS).logits, base(IDS).logits, atol=1e-5, rtol=0)


@pytest.mark.core
def test_names_are_the_authors(tmp_path):
    _, heads = made("medusa-own")
    heads.export(tmp_path / "medusa", "medusa")
    named = load_file(tmp_path / "medusa" / "medusa_lm_head.safetensors")
    want = {f"{k}.{j}.linear.{part}" for k in range(3) for j in range(2) for part in ("weight", "bias")}
    assert named.keys() == want | {f"{k}.2.weight" for k in range(3)}
    assert torch.equal(named["1.0.linear.weight"], named["1.1.linear.weight"])
    heads.export(tmp_path / "vllm", "vllm")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["medusa_fc_bias"] is True and config["num_heads"] == 3 and config["num_hidden_layers"] == 2
    assert {"blocks.2.layers.1.bias", "lm_heads.2.weight"} < load_file(tmp_path / "vllm" / "model.safetensors").keys()
    _, hydra = made("hydra++", num_blocks=2)
    hydra.export(tmp_path / "hydra", "hydra")
    named = torch.load(tmp_path / "hydra" / "hydra_lm_head.pt", weights_only=True)
    prefix = {f"prefix_embeding_layer.{name}" for name in ("layers.0.self_attn.q_proj.weight", "embed_tokens.weight")}
    blocks = {"hydra_mlp.0.1.res_connection.weight", "hydra_mlp.2.3.linear.bias", "hydra_lm_head.1.1.weight"}
    assert prefix | blocks | {"input_embed_fn.weight"} < named.keys()


@torch.no_grad()
def test_independent_heads_are_medusa_without_blocks_for_vllm(tmp_path):
    for unembedding in ["own", "shared"]:
        base = backbone()
        heads = shaken(MTPHeads.from_backbone(base, window=4, unembedding=unembedding)).eval()
        heads.export(tmp_path, "vllm")
        config, named = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
        assert config["num_heads"] == 3 and config["num_hidden_layers"] == 0 and config["truncated_vocab_size"] == 64
        states = base(IDS, output_hidden_states=True).hidden_states[-1]
        logits = heads.distribution_of_features(states).leaf_logits[..., 0, :]
        for k in range(3):
            torch.testing.assert_close(
                states @ named[f"lm_heads.{k}.weight"].T, logits[..., k + 1, :], atol=1e-4, rtol=0
            )
        with pytest.raises(ValueError, match="'ff' heads"):
            MTPHeads.from_official(tmp_path)


def test_heads_of_a_merged_model_and_their_backbone(tmp_path):
    base, heads = made("medusa-own", num_blocks=1, tied_blocks=False)
    base.save_pretrained(tmp_path)
    heads.export(tmp_path / "apart", "medusa")
    apart = load_file(tmp_path / "apart" / "medusa_lm_head.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"medusa_head.{name}": tensor for name, tensor in apart.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"medusa_num_heads": 2, "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole, again = MTPHeads.backbone_from_official(tmp_path), MTPHeads.from_official(tmp_path)
    torch.testing.assert_close(distribution_of(again.attach(whole)), distribution_of(heads), atol=1e-6, rtol=0)
    assert again.window == 4  # the weights decide, not medusa_num_heads; a whole model's other fields are its own
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_gate": 3}))
    with pytest.raises(ValueError, match="medusa_gate=3"):
        MTPHeads.from_official(tmp_path)
    with pytest.raises(ValueError, match="holds heads alone"):
        MTPHeads.backbone_from_official(tmp_path / "apart")


def test_heads_without_unembeddings_read_the_vocabulary_of_their_backbone(tmp_path):
    base, heads = made("medusa")
    heads.export(tmp_path, "medusa")
    assert json.loads((tmp_path / "config.json").read_text())["version"] == "2"
    again = MTPHeads.from_official(tmp_path).attach(base)
    assert again.config.vocab_size == again.head.vocab_size == 64
    torch.testing.assert_close(distribution_of(again), distribution_of(heads), atol=1e-6, rtol=0)


def test_the_prefix_layer_of_hydra_has_the_epsilon_of_the_backbone(tmp_path):
    base = backbone(rms_norm_eps=1e-3)
    heads = shaken(MTPHeads.from_backbone(base, window=4, **KINDS["hydra++"])).eval()
    heads.export(tmp_path, "hydra")
    again = MTPHeads.from_official(tmp_path).attach(base)
    torch.testing.assert_close(distribution_of(again), distribution_of(heads), atol=1e-6, rtol=0)
    again.save_pretrained(tmp_path / "ours")
    assert MTPHeads.from_pretrained(tmp_path / "ours").config.backbone_config["rms_norm_eps"] == 1e-3


def test_hydra_heads_refuse_a_backbone_with_other_embeddings(tmp_path):
    base, heads = made("hydra", unembedding="own")
    heads.export(tmp_path, "hydra")
    other = backbone()
    with torch.no_grad():
        other.model.embed_tokens.weight.add_(1)
    with pytest.raises(ValueError, match="embeddings"):
        MTPHeads.from_official(tmp_path).attach(other)
    MTPHeads.from_official(tmp_path).attach(base)


def _broken(folder, **changes):
    """A directory of Medusa heads with tensors added, or taken away (None)."""
    _, heads = made("medusa-own")
    heads.export(folder, "vllm" if "token_map" in changes else "medusa")
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.mark.core
def test_damaged_and_foreign_folders_are_refused_by_name(tmp_path):
    _broken(tmp_path / "more", **{"3.9.gate.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"1.*3\.9\.gate\.weight"):
        MTPHeads.from_official(tmp_path / "more")
    _broken(tmp_path / "less", **{"1.0.linear.bias": None, "1.1.linear.bias": None})
    with pytest.raises(ValueError, match="'medusa'.*1.*0"):
        MTPHeads.from_official(tmp_path / "less")
    _broken(tmp_path / "map", token_map=torch.arange(5))
    with pytest.raises(ValueError, match="token_map.*5"):
        MTPHeads.from_official(tmp_path / "map")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no known layout"):
        MTPHeads.from_official(tmp_path / "empty")
    made("layer")[1].save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="from_pretrained"):
        MTPHeads.from_official(tmp_path / "own")
    params = json.loads((GOLDENS / "gloeckle" / "official" / "params.json").read_text())
    (tmp_path / "one").mkdir()
    tensors = torch.load(GOLDENS / "gloeckle" / "official" / "consolidated.pth", weights_only=True)
    torch.save({n: t for n, t in tensors.items() if "extra" not in n}, tmp_path / "one" / "consolidated.pth")
    (tmp_path / "one" / "params.json").write_text(json.dumps(params | {"n_future_tokens": 1, "n_layers": 2}))
    with pytest.raises(ValueError, match="n_future_tokens=1"):
        MTPHeads.from_official(tmp_path / "one")
    assert MTPHeads.backbone_from_official(tmp_path / "one").config.num_hidden_layers == 2


class _Code:
    def __reduce__(self):
        return print, ("run",)


def test_a_pickle_with_code_is_not_unpickled(tmp_path, capsys):
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.linear.weight": _Code()}))
    with pytest.raises(ValueError, match="more than tensors"):
        MTPHeads.from_official(tmp_path)
    assert "run" not in capsys.readouterr().out


def test_what_a_layout_cannot_hold_is_refused(tmp_path):
    for kind, layout, message in [
        ("hydra", "medusa", "'hydra'"),
        ("blockwise", "vllm", "block='ffn'"),
        ("hydra", "hydra", "unembedding is 'own'"),
        ("layer-weighted", "gloeckle", "mix='none'"),
        ("medusa", "eagle", "layout='eagle'"),
    ]:
        _, heads = made(kind)
        with pytest.raises(ValueError, match=message):
            heads.export(tmp_path / "out", layout)
        assert not list(tmp_path.glob("out/*"))


FIELDS = [
    ("hydra_mlp/official", {"logit_scale": 2.0}, "logit_scale"),
    ("gloeckle/official", {"use_scaled_rope": True}, "use_scaled_rope"),
]


def test_fields_that_are_not_read_or_contradict_the_tensors(tmp_path):
    for number, (name, changes, message) in enumerate(FIELDS):
        check_fields(GOLDENS / name, changes, message, tmp_path / str(number))


def check_fields(source, changes, message, target):
    """Neutral values pass, others are refused by name, and unknown ones are passed over on request."""
    target.mkdir()
    file = "params.json" if (source / "params.json").exists() else "config.json"
    for each in source.iterdir():
        (target / each.name).write_bytes(each.read_bytes())
    values = json.loads((source / file).read_text())
    neutral = {"embed_norm": False, "scale_emb": 1.0, "quantization_config": None}
    (target / file).write_text(json.dumps(values | neutral))
    expected = MTPHeads.from_official(source).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in MTPHeads.from_official(target).state_dict().items())
    (target / file).write_text(json.dumps(values | changes))
    with pytest.raises(ValueError, match=message):
        MTPHeads.from_official(target)
    (target / file).write_text(json.dumps(values | {"new_head_of_2027": 3}))
    with pytest.raises(ValueError, match=r"new_head_of_2027=3.*ignore_fields=\['new_head_of_2027'\]"):
        MTPHeads.from_official(target)
    found = MTPHeads.from_official(target, ignore_fields=["new_head_of_2027"]).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in found.items()) and len(found) == len(expected)


MEDUSA_FIELDS = [
    ("medusa", {"version": "2"}, "version='2'"),
    ("medusa", {"logit_scale": 2.0}, "logit_scale=2.0"),
    ("medusa", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("vllm", {"medusa_fc_bias": False}, "medusa_fc_bias=False"),
    ("vllm", {"truncated_vocab_size": 32}, "truncated_vocab_size=32"),
    ("vllm", {"logit_scale": 0.5}, "logit_scale=0.5"),
]


def test_fields_of_medusas_folders(tmp_path):
    for number, (layout, changes, message) in enumerate(MEDUSA_FIELDS):
        _, heads = made("medusa", unembedding="own")
        heads.export(tmp_path / f"{number}" / "source", layout)
        check_fields(tmp_path / f"{number}" / "source", changes, message, tmp_path / f"{number}" / "target")
