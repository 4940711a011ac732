"""MtPC's published files: their circuits, adapters and steps, read into heads; what is not known is refused by name."""

import copy
import pickle

import pytest
import torch
import yaml

from tests.modeling.heads.backbones import backbone
from tests.models import tiny_model
from tests.mtpc_files import LEAVES, SCOPE, SUM, log_prob, published, settings, write
from tokenahead import EvaByteForMTPC, MTPHeads

CASES = [("ff", 4), ("cp", 2), ("cp", 4), ("hmm", 4), ("hmm", 5), ("btree", 4), ("btree", 8), ("btree", 16)]
IDS = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def evabyte(**changes):
    return tiny_model(vocab_size=40, num_hidden_layers=3, num_pred_heads=3, **changes)


def llama(**changes):
    return backbone(vocab_size=40, num_key_value_heads=4, **changes)


def saved(folder, kind="hmm", n=4, lora=0, **changes):
    return write(folder, published(kind, n, lora=lora) | changes, settings(kind, n, lora=lora))


def windows(n, count=6):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(count, 32, generator=generator).double(), torch.randint(0, 40, (count, n), generator=generator)


@torch.no_grad()
def scored(heads, n):
    states, tokens = windows(n)
    return heads.double().distribution_of_features(states).log_prob(tokens)


def wanted(kind, tensors, n):
    return torch.stack([log_prob(kind, tensors, state, tokens) for state, tokens in zip(*windows(n))])


@pytest.mark.by_day("ff-4", "cp-2", "hmm-4", "btree-8")
@pytest.mark.core_cases("hmm-4", "btree-8")
@pytest.mark.parametrize(("kind", "n"), CASES, ids=lambda value: str(value))
def test_a_circuit_is_the_one_of_the_file(kind, n, tmp_path):
    tensors = published(kind, n)
    heads = MTPHeads.from_official(write(tmp_path, tensors, settings(kind, n)))
    assert (heads.config.head_type, heads.window, heads.config.gamma) == (kind, n, 0.8)
    assert heads.dtype == torch.bfloat16 and not any(part.is_meta for part in heads.state_dict().values())
    torch.testing.assert_close(scored(heads, n), wanted(kind, tensors, n), atol=1e-10, rtol=0)


def test_without_settings_the_shapes_decide(tmp_path):
    for kind in ["ff", "cp", "hmm", "btree"]:
        heads = MTPHeads.from_official(write(tmp_path, published(kind, 8), None))
        assert heads.config.head_type == kind
        torch.testing.assert_close(scored(heads, 8), wanted(kind, published(kind, 8), 8), atol=1e-10, rtol=0)


def test_positions_are_those_of_the_file(tmp_path):
    for kind in ["cp", "hmm", "btree"]:
        tensors = published(kind) | {SCOPE: torch.tensor([[2], [0], [3], [1]])}
        heads = MTPHeads.from_official(write(tmp_path, tensors, settings(kind)))
        torch.testing.assert_close(scored(heads, 4), wanted(kind, tensors, 4), atol=1e-10, rtol=0)
        del (unsaid := published(kind))[SCOPE]
        heads = MTPHeads.from_official(write(tmp_path, unsaid, settings(kind)))
        torch.testing.assert_close(scored(heads, 4), wanted(kind, published(kind), 4), atol=1e-10, rtol=0)


def test_orders_of_sums_matter(tmp_path):
    """That the comparison above sees a wrong order: sums reversed, or rows and columns swapped."""
    for kind in ["hmm", "btree"]:
        n, tensors = 8, published(kind, 8)
        heads = MTPHeads.from_official(write(tmp_path, tensors, settings(kind, n)))
        swapped = tensors | {SUM.format(0): tensors[SUM.format(0)].transpose(1, 2).contiguous()}
        names = [SUM.format(k) for k in (0, 1)]
        first = tensors[names[0]].flip(0) if kind == "btree" else tensors[names[1]]
        reordered = tensors | {names[0]: first} | ({} if kind == "btree" else {names[1]: tensors[names[0]]})
        for wrong in (swapped, reordered):
            assert (scored(heads, n) - wanted(kind, wrong, n)).abs().max() > 1e-3


@pytest.mark.by_day("ff", "hmm")
@pytest.mark.parametrize("kind", ["ff", "cp", "hmm", "btree"])
def test_evabyte_drafts_with_them_and_says_what_it_said(kind, tmp_path):
    tensors, own = published(kind), evabyte()
    folder = write(tmp_path / "heads", tensors, settings(kind))
    model = EvaByteForMTPC.from_official(folder, own)
    assert model is own and model.window == 4 and model.config.mtp_head.gamma == 0.8
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_mtp=False, **options))
    model.save_pretrained(tmp_path / "saved")
    again = EvaByteForMTPC.from_pretrained(tmp_path / "saved")
    states, tokens = windows(4)
    with torch.no_grad():
        found, kept = ((m.double().distribution_of_features(states).prefix_log_prob(tokens)) for m in (model, again))
    torch.testing.assert_close(found, kept)
    if kind == "ff":  # position 1 is the model's own
        logits = torch.einsum("nvd,bd->bnv", tensors[LEAVES][1:, 0].double(), states)
        want = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).sum((1, 2))
        found = found[:, -1] - found[:, 0]
    else:
        want, found = wanted(kind, tensors, 4), found[:, -1]
    torch.testing.assert_close(found, want, atol=1e-10, rtol=0)


def adapted(base, tensors, count):
    """The model with the adapters of a file in the weights of its last layers: its states are what the heads read."""
    base, rest = copy.deepcopy(base), {}
    for name, tensor in tensors.items():
        if tensor is not None and ".lora_A." in name:
            layer, path = name.split("layers.")[1].split(".lora_A")[0].split(".", 1)
            module = base.get_submodule(f"model.layers.{layer}.{path}")
            module.weight.data += 2.0 * tensors[name.replace("lora_A", "lora_B")] @ tensor  # alpha / r
            rest[layer] = module
    assert len(rest) == count
    return base


@pytest.mark.by_day("evabyte-1", "llama-2")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("model", [evabyte, llama])
@torch.no_grad()
def test_adapters_are_those_of_the_last_layers(model, count, tmp_path):
    base, tensors = model(), published("btree", lora=count)
    folder = write(tmp_path, tensors, settings("btree", lora=count))
    want = adapted(base, tensors, count)(IDS, output_hidden_states=True).hidden_states[-1]
    if model is evabyte:
        heads = EvaByteForMTPC.from_official(folder, base)
        states = base.model(IDS, use_cache=False, output_hidden_states=heads.hidden_layers).hidden_states
        drafts = {}
    else:
        heads = MTPHeads.from_official(folder, base)
        states, drafts = base(IDS, output_hidden_states=True).hidden_states, {"assistant_model": heads}
    torch.testing.assert_close(heads.features(states), want, atol=2e-5, rtol=0)
    assert (want - states[-1]).abs().max() > 0.1
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)
    plain = base.generate(IDS, **options, **({} if drafts else {"use_mtp": False}))
    assert torch.equal(base.generate(IDS, **options, **drafts), plain)


def test_the_last_step_is_read_without_what_trained_it(tmp_path):
    write(tmp_path, published("cp", r=3), settings("cp", r=3), step=9)
    saved(tmp_path, "cp")  # step 3
    write(tmp_path, published("cp"), settings("cp"), step=10)
    assert MTPHeads.from_official(tmp_path).config.rank == 2


def test_names_of_wrapped_models_are_read(tmp_path):
    tensors = {f"module._orig_mod.{name}": value for name, value in published("hmm").items()}
    heads = MTPHeads.from_official(write(tmp_path, tensors, settings("hmm")))
    torch.testing.assert_close(scored(heads, 4), wanted("hmm", published("hmm"), 4), atol=1e-10, rtol=0)


def test_an_hmm_may_have_a_bias_or_share_its_steps(tmp_path):
    tensors, bias = published("hmm"), torch.randn(1, 2, 2, generator=torch.Generator().manual_seed(5))
    heads = MTPHeads.from_official(write(tmp_path, tensors | {SUM.format(1)[:-4] + "bias": bias}, settings("hmm")))
    assert torch.equal(heads.head.sum_bias[2:].view(3, 2, 2)[1], bias[0])
    shared = {name: value for name, value in tensors.items() if name not in (SUM.format(2), SUM.format(3))}
    shared[SUM.format(1)] = tensors[SUM.format(3)]
    heads = MTPHeads.from_official(write(tmp_path, shared, settings("hmm")))
    assert heads.config.homogeneous
    again = tensors | {SUM.format(k): tensors[SUM.format(0)] for k in range(3)}
    torch.testing.assert_close(scored(heads, 4), wanted("hmm", again, 4), atol=1e-10, rtol=0)
    alone = {SUM.format(k): tensors[SUM.format(k)][..., 0].float() for k in range(4)}
    fixed = settings("hmm")
    fixed["mt_head"]["hyperparameters"]["contextual_hmm_weights"] = False
    heads = MTPHeads.from_official(write(tmp_path, tensors | alone, fixed))
    assert not heads.config.contextual
    assert torch.equal(heads.head.sum_bias[:2], alone[SUM.format(3)].flatten().to(heads.head.sum_bias))


def _without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def _with(**named):
    return lambda tensors: tensors.update({name.replace("__", "."): value for name, value in named.items()})


def _set(name, value):
    def change(values):
        *path, last = name.split(".")
        for part in path:
            values = values[part]
        values[last] = value

    return change


LORA = "lm._lm.base_model.model.model.layers.2.mlp.up_proj.lora_{}.default.weight"
SMALL = torch.zeros(2, 2)
WRONG_TENSORS = {
    "leaves": (_without(LEAVES), LEAVES),
    "root": (_without(SUM.format(3)), "_sum_weights_heads"),
    "step": (_without(SUM.format(1)), "_sum_weights_heads"),
    "more": (_with(mt_head__extra=SMALL), r"mt_head\.extra"),
    "mlp": (_with(mt_head___sum_weights_heads__0__head__mlp__0__weight=SMALL), r"heads\.0\.head\.mlp\.0\.weight"),
    "transformer": (_with(mt_head___transformer_head__layer=SMALL), "_transformer_head"),
    "rotary": (_with(mt_head___rotary_emb__inv_freq=SMALL), "_rotary_emb"),
    "norm": (_with(mt_head___norm__weight=SMALL), r"_norm\.weight"),
    "other trees": (_with(mt_head___categorical_log_probs_heads__1__head__proj=SMALL), r"probs_heads\.1"),
    "bias by another name": (_with(mt_head___sum_weights_heads__0__head__scale=SMALL), r"head\.scale"),
    "bias of another shape": (_with(mt_head___sum_weights_heads__0__head__bias=SMALL), r"head\.bias"),
    "backbone": (_with(**{"lm._lm.lm_head.weight": SMALL}), r"lm\._lm\.lm_head\.weight"),
    "order": (_with(**{SCOPE: torch.tensor([[0], [0], [1], [2]])}), "_scope_idx"),
    "dtype": (_with(**{LEAVES: torch.zeros(4, 2, 40, 32, dtype=torch.int64)}), "int64"),
    "expanded": (_with(**{LEAVES: torch.zeros(1, 1, 1, 1).expand(10**4, 10**3, 40, 32)}), "more than the file"),
    "adapters elsewhere": (_with(**{LORA.format("A").replace("layers.2", "layers.1"): SMALL}), r"layers \[1\]"),
    "adapters of one map": (_with(**{LORA.format(x): torch.zeros(4, 64) for x in "A"}), "lora_B|q_proj"),
    "foreign adapters": (_with(**{LORA.format("A").replace("mlp.up_proj", "mlp.gate"): SMALL}), r"mlp\.gate"),
}
WRONG_SETTINGS = {
    "circuit.n_repetition": 2,
    "circuit.model.kind": "random-btree",
    "mt_head.hyperparameters.transformer_n_layer": 1,
    "mt_head.hyperparameters.expander_type": "mlp",
    "adaptor.hyperparameters": {"r": 16},
    "mt_head.hyperparameters.expander_n_layer": "${mt_head.hyperparameters.expander_n_layer}",
}


def test_unknown_tensors_are_refused_by_name(tmp_path):
    for kind in WRONG_TENSORS:
        change, named = WRONG_TENSORS[kind]
        change(tensors := published("hmm"))
        with pytest.raises(ValueError, match=named):
            MTPHeads.from_official(write(tmp_path, tensors, settings("hmm")), llama())


def test_settings_that_are_not_known_are_refused_by_name(tmp_path):
    for name in WRONG_SETTINGS:
        _set(name, WRONG_SETTINGS[name])(values := settings("hmm"))
        with pytest.raises(ValueError, match=name):
            EvaByteForMTPC.from_official(write(tmp_path, published("hmm"), values), evabyte())


def test_other_sums_than_the_named_circuit_has(tmp_path):
    with pytest.raises(ValueError, match=r"_sum_weights_heads.*'btree'"):
        MTPHeads.from_official(write(tmp_path, published("hmm"), settings("btree")))
    with pytest.raises(ValueError, match=r"_sum_weights_heads.*head\.bias"):
        bias = {SUM.format(0)[:-4] + "bias": torch.zeros(1, 1, 2)}
        MTPHeads.from_official(write(tmp_path, published("cp") | bias, settings("cp")))


def test_another_backbone_is_refused(tmp_path):
    for changed in [{"vocab_size": 64}, {"hidden_size": 64}]:
        (name,) = changed
        folder = saved(tmp_path)
        with pytest.raises(ValueError, match=name):
            EvaByteForMTPC.from_official(folder, tiny_model(**{"vocab_size": 40} | changed))
        with pytest.raises(ValueError, match=name):
            MTPHeads.from_official(folder, llama(**changed) if name != "vocab_size" else backbone())


def test_adapters_need_their_backbone_and_their_scale(tmp_path):
    folder = saved(tmp_path, "btree", lora=1)
    with pytest.raises(ValueError, match="backbone"):
        MTPHeads.from_official(folder)
    for load, model in ((MTPHeads.from_official, llama), (EvaByteForMTPC.from_official, tiny_model)):
        with pytest.raises(ValueError, match="num_hidden_layers|3 layers"):
            load(
                folder, model(num_hidden_layers=2, vocab_size=40) if model is tiny_model else llama(num_hidden_layers=2)
            )
    (folder / "config.yaml").unlink()
    with pytest.raises(ValueError, match="lora_alpha"):
        MTPHeads.from_official(folder, llama())


def test_damaged_files_are_named(tmp_path):
    folder = saved(tmp_path)
    with pytest.raises(ValueError, match="from_official"):
        MTPHeads.from_pretrained(folder)
    (folder / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml is damaged"):
        MTPHeads.from_official(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings("hmm")))
    torch.save({"model_state_dict": {"a": 1}}, folder / "model@3.pt")
    with pytest.raises(ValueError, match="model_state_dict"):
        MTPHeads.from_official(folder)
    torch.save({"model_state_dict": {}, "more": pickle.Pickler}, folder / "model@3.pt")
    with pytest.raises(ValueError, match="more than tensors"):
        MTPHeads.from_official(folder)
    (folder / "model@3.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="model@3.pt"):
        EvaByteForMTPC.from_official(folder, evabyte())
