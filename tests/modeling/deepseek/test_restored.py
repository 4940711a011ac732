"""A fine-tune that lost its modules gets those of its base: its own text, the base's tensors, and what is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import NAMES, family_model, most_modules, random_ids, shake
from tests.modeling.deepseek.test_float8 import announce, put_in_float8
from tests.modeling.deepseek.test_model import folder_tensors, rewrite
from tests.towers import tower_model
from tokenahead import DeepSeekMTP
from tokenahead.configuration.mtp_families import family_of
from tokenahead.modeling.deepseek.conversion import main_class

OPTIONS = dict(max_new_tokens=12, do_sample=False)
CASES = {name: {} for name in NAMES} | {"tied": {"tie_word_embeddings": True}}


def tune(base, folder, **options):
    """The plain model of a directory, with changed weights, in another one."""
    plain = main_class(DeepSeekMTP.from_pretrained(base).config).from_pretrained(base)
    shake(plain, 7, 0.02).eval().save_pretrained(folder, **options)
    return plain


@pytest.fixture
def pair(tmp_path):
    """Directories of a fine-tune, and of its base with two modules."""
    family_model("deepseek_v3", num_nextn_predict_layers=2).save_pretrained(tmp_path / "base")
    tune(tmp_path / "base", tmp_path / "tuned")
    return tmp_path / "tuned", tmp_path / "base"


@pytest.mark.by_day("deepseek_v3", "tied", "qwen3_next")
@pytest.mark.parametrize("case", CASES)
def test_text_is_the_tuned_model_s_and_modules_are_the_base_s(case, tmp_path):
    base, tuned, again = (tmp_path / each for each in ("base", "tuned", "again"))
    name = "deepseek_v3" if case == "tied" else case
    source = family_model(name, num_nextn_predict_layers=(count := most_modules(name)), **CASES[case])
    source.save_pretrained(base, max_shard_size="40KB")
    plain, ids = tune(base, tuned, max_shard_size="60KB"), random_ids(length=6)
    text = plain.generate(ids, **OPTIONS)
    model = DeepSeekMTP.from_pretrained(tuned, modules=base)
    assert model.num_modules == count and model.generate(ids, **OPTIONS).equal(text)
    assert all(map(torch.equal, model.mtp.parameters(), source.mtp.parameters()))
    model.save_pretrained(again)
    stored, ours, theirs = (folder_tensors(each) for each in (again, tuned, base))
    assert stored.keys() == theirs.keys() and all(stored[key].equal(ours[key]) for key in ours)
    # what modules share with the main model, of which files of some families hold copies
    copies = [key for key in theirs.keys() - ours.keys() if not stored[key].equal(theirs[key])]
    shared = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert len(copies) == count * len(family_of(plain.config).copies)
    assert all(any(map(stored[key].equal, shared)) for key in copies)
    loaded = DeepSeekMTP.from_pretrained(again)
    assert loaded.generate(ids, **OPTIONS).equal(text)
    assert all(map(torch.equal, loaded(ids).mtp_logits, model(ids).mtp_logits))


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", 64), ("vocab_size", 128), ("num_hidden_layers", 3), ("model_type", "glm4_moe_lite")],
)
def test_a_base_of_other_sizes_is_refused_by_name(pair, field, value):
    tuned, base = pair
    own = json.loads((base / "config.json").read_text())[field]
    rewrite(tuned, **{field: value})
    with pytest.raises(ValueError, match=f"modules=.*base.*{field}={own!r}.*tuned has {value!r}"):
        DeepSeekMTP.from_pretrained(tuned, modules=base)


def test_a_base_without_modules_is_refused(pair):
    tuned, _ = pair
    with pytest.raises(ValueError, match="tuned: no tensors of modules .*modules="):
        DeepSeekMTP.from_pretrained(tuned, modules=tuned)


@pytest.mark.parametrize("which", [0, 1])
def test_weights_that_are_quantised_otherwise_are_refused(pair, which):
    announce(pair[which], {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=rf"{pair[which].name} is quantised \(gptq\)"):
        DeepSeekMTP.from_pretrained(pair[0], modules=pair[1])


def test_modules_in_float8_are_multiplied_by_their_scales(pair):
    tuned, base = pair
    whole = DeepSeekMTP.from_pretrained(tuned, modules=base)
    put_in_float8(base)
    model, ids = DeepSeekMTP.from_pretrained(tuned, modules=base), random_ids()
    assert model(ids).logits.equal(whole(ids).logits)
    for (name, weight), other in zip(whole.mtp.named_parameters(), model.mtp.parameters()):
        assert (other - weight).abs().max() <= weight.abs().max() / 16 + 1e-6, name
    assert not all(map(torch.equal, whole.mtp.parameters(), model.mtp.parameters()))


def test_the_text_of_a_model_with_a_tower_gets_its_modules(tmp_path):
    base = tower_model("qwen3_5")
    base.save_pretrained(tmp_path / "base")
    text = base.config.get_text_config()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", config=text).eval()
    plain.save_pretrained(tmp_path / "tuned")
    model = DeepSeekMTP.from_pretrained(tmp_path / "tuned", modules=tmp_path / "base")
    assert all(map(torch.equal, model.mtp.parameters(), base.mtp.parameters()))
    assert model.generate(random_ids(), **OPTIONS).equal(plain.generate(random_ids(), **OPTIONS))


def test_without_modules_the_option_changes_nothing(pair):
    model = DeepSeekMTP.from_pretrained(pair[0], inference_only=True, modules=pair[1])
    assert model.num_modules == 0
