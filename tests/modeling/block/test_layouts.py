"""Layouts of block drafters: what is read, written, refused, and warned of."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.backbones import backbone
from tests.modeling.block.test_decoding import drafter_of
from tests.modeling.block.test_golden import CASES, DATA, pair
from tests.models import left_padded
from tests.test_tables import table
from tokenahead import BlockDrafter, EagleHead
from tokenahead.modeling.block import layouts
from tokenahead.modeling.common.loading import drafter_class, holds_drafter_alone, read_drafter

DEEPSPEC, DSPARK, DFLASH, DFLASH2 = "deepspec_dspark_gated", "speculators_dspark", "speculators_dflash", "zlab_dflash2"
IDS = torch.tensor([[5, 9, 33, 17, 46, 9, 19]])


def drafts(base, drafter):
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    drafter.attach(base)
    return base.generate(IDS, **options, assistant_model=drafter).speculation.drafts


@pytest.mark.by_day("zlab_dflash2", "speculators_dspark", "deepspec_dspark_gated")
@pytest.mark.parametrize("name", CASES)
def test_a_loaded_drafter_is_saved_in_its_layout_and_in_ours(name, tmp_path):
    base, drafter = pair(name)
    wanted = drafts(base, drafter)
    drafter.save_pretrained(tmp_path / "theirs")
    stored, written = (load_file(folder / "model.safetensors") for folder in (DATA / name, tmp_path / "theirs"))
    assert stored.keys() == written.keys() and all(stored[key].equal(written[key]) for key in stored)
    drafter.config.layout = "tokenahead"
    drafter.save_pretrained(tmp_path / "ours")
    for folder in ("theirs", "ours"):
        again = BlockDrafter.from_pretrained(tmp_path / folder, dtype=torch.float32)
        assert drafts(base, again) == wanted
        assert drafter_class(tmp_path / folder) is BlockDrafter and holds_drafter_alone(tmp_path / folder)


@pytest.mark.by_day(
    "z-lab-independent-options1",
    "z-lab-markov-options2",
    "z-lab-selector-options4",
    "speculators-markov-options6",
    "deepspec-markov-options8",
    "z-lab-domino-options10",
)
@pytest.mark.parametrize(
    ("layout", "law", "options"),
    [
        ("z-lab", "independent", dict(sample_from_anchor=False, causal=True)),
        (
            "z-lab",
            "independent",
            dict(sample_from_anchor=False, layer_types=["sliding_attention"] * 2, sliding_window=4),
        ),
        ("z-lab", "markov", dict(output_multiplier=0.5, final_logit_softcapping=20.0)),
        ("z-lab", "markov", dict(sample_from_anchor=False, has_confidence=True)),
        ("z-lab", "selector", dict(sample_from_anchor=False, conv_kernel_size=2, conv_group_size=8)),
        ("speculators", "independent", dict(sample_from_anchor=False, draft_ids=torch.arange(3, 40))),
        ("speculators", "markov", dict(has_confidence=True, draft_ids=torch.arange(3, 40))),
        ("speculators", "selector", dict(sample_from_anchor=False, conv_kernel_size=2, conv_group_size=8)),
        ("deepspec", "markov", dict(has_confidence=True, law_options={"kind": "rnn", "rank": 4})),
        ("deepspec", "independent", dict(attention_bias=True)),
        ("z-lab", "domino", dict(law_options={"rank": 4, "state_size": 5, "free_places": 2})),
    ],
)
def test_new_drafters_are_exported_and_read_back(layout, law, options, tmp_path):
    model = backbone("qwen3")
    drafter = drafter_of(model, law, **options)
    wanted = drafts(model, drafter)
    drafter.export(tmp_path, layout=layout)
    again = BlockDrafter.from_pretrained(tmp_path, dtype=torch.float32)
    drafter.detach()
    assert again.config.layout == layout and drafts(model, again) == wanted


def documented_cells():
    """What the page says of every law, first row and layout, and the options of such a drafter."""
    for named, anchor, *cells in table("docs/methods/block.md", "made with `law=`"):
        convolved = dict(conv_kernel_size=3, conv_group_size=8) if "conv_kernel_size=3" in named else {}
        for law in re.findall(r'"(\w+)"', named):
            for first in (True, False) if anchor == "either" else (anchor == "`True`",):
                for layout, cell in zip(("z-lab", "speculators", "deepspec"), cells, strict=True):
                    yield law, layout, dict(sample_from_anchor=first) | convolved, {"yes": True, "no": False}[cell]


def test_a_layout_holds_what_the_page_says(tmp_path):
    base = backbone("qwen3")
    for number, (law, layout, options, is_held) in enumerate(documented_cells()):
        drafter = drafter_of(base, law, **options)
        if not is_held:
            with pytest.raises(ValueError, match=f"layout='{layout}'"):
                drafter.export(tmp_path, layout=layout)
            continue
        drafter.export(tmp_path / str(number), layout=layout)
        again = BlockDrafter.from_pretrained(tmp_path / str(number)).config
        names = ("law", "sample_from_anchor", "conv_kernel_size")
        assert [getattr(again, name) for name in names] == [getattr(drafter.config, name) for name in names]


def test_what_a_layout_cannot_hold_is_refused_by_name(tmp_path):
    for layout, law, options, message in [
        ("z-lab", "selector", {}, "conv_kernel_size=None"),
        ("speculators", "selector", {}, "conv_kernel_size=None"),
        ("deepspec", "selector", {}, "law='selector'"),
        ("z-lab", "markov", dict(conv_kernel_size=3, conv_group_size=8), "conv_kernel_size=3"),
        ("z-lab", "independent", {}, "holds sample_from_anchor=False"),
        ("deepspec", "independent", dict(sample_from_anchor=False), "holds sample_from_anchor=True"),
        ("z-lab", "hmm", {}, "law='hmm'"),
        ("speculators", "domino", {}, "law='domino'"),
        ("deepspec", "domino", {}, "law='domino'"),
        ("z-lab", "markov", dict(body="gemma4"), "body='gemma4'"),
        ("z-lab", "markov", dict(draft_ids=torch.arange(3, 40)), "draft_vocab_size=37"),
        ("deepspec", "selector", dict(conv_kernel_size=2, conv_group_size=8), "law='selector'"),
        ("speculators", "independent", dict(output_multiplier=0.5), "output_multiplier"),
        ("speculators", "selector", dict(conv_kernel_size=2, draft_ids=torch.arange(3, 40)), "law='selector'"),
        ("speculators", "independent", dict(causal=True), "causal=True"),
        ("z-lab", "markov", dict(mask_embedding=True), "mask_embedding=True"),
        ("other", "independent", {}, "layout='other'.*deepspec.*speculators.*z-lab"),
    ]:
        with pytest.raises(ValueError, match=message):
            drafter_of(backbone("qwen3"), law, **options).export(tmp_path / "new", layout=layout)
        assert not list(tmp_path.glob("new/*"))


def test_which_rows_draft_is_never_guessed(edited):
    silent = {"sample_from_anchor": ...}
    proposed = lambda count: {"speculators_config": {"proposal_methods": [{"speculative_tokens": count}]}}  # noqa: E731
    for count, first in ((5, True), (4, False)):
        drafter = BlockDrafter.from_pretrained(edited(DSPARK, silent | proposed(count)))
        assert drafter.config.sample_from_anchor is first
    folder = edited(DSPARK, silent | proposed(7))
    with pytest.raises(ValueError, match="pass sample_from_anchor="):
        BlockDrafter.from_pretrained(folder)
    assert BlockDrafter.from_pretrained(folder, sample_from_anchor=False).num_drafts == 4
    assert BlockDrafter.from_pretrained(edited(DFLASH, silent | proposed(6))).num_drafts == 5
    assert BlockDrafter.from_pretrained(edited(DEEPSPEC, {"dspark_bonus_anchor": True})).num_drafts == 4


def test_default_states_are_those_of_the_official_formula(edited):
    assert layouts.default_ids(36, 5) == [1, 9, 17, 25, 33]
    assert layouts.default_ids(32, 5) == [1, 8, 15, 22, 29]
    assert layouts.default_ids(36, 1) == [18]
    open_ids = {"mask_token_id": 90, "block_size": 5}
    assert BlockDrafter.from_pretrained(edited("zlab_llama", {"dflash_config": open_ids})).feature_layers == [2, 5]
    folder = edited("zlab_llama", {"dflash_config": open_ids, "num_target_layers": ...})
    with pytest.raises(ValueError, match="pass feature_layers="):
        BlockDrafter.from_pretrained(folder)
    assert BlockDrafter.from_pretrained(folder, feature_layers=[2, 5]).feature_layers == [2, 5]


def test_configs_that_say_too_little_or_something_else_are_refused(edited):
    for name, fields, message in [
        ("zlab_llama", {"architectures": ["DominoDraftModel"]}, "DominoDraftModel.*embed_proj"),
        (DEEPSPEC, {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        (DEEPSPEC, {"architectures": ["DSparkDeepseekV4ForCausalLM"]}, "DSparkDeepseekV4ForCausalLM"),
        (DSPARK, {"speculators_model_type": "xpress"}, "XPressSpeculator"),
        ("zlab_llama", {"architectures": ["OtherModel"]}, "OtherModel"),
        ("zlab_llama", {"dflash_config": {"block_size": 5, "target_layer_ids": [1, 4]}}, "mask_token_id"),
        ("zlab_llama", {"attention_sink_bias": True}, "attention_sink_bias"),
        ("zlab_llama", {"use_swa": True, "sliding_window": ...}, "swa_window_size"),
        (DSPARK, {"aux_hidden_state_layer_ids": ...}, "pass feature_layers="),
        (DSPARK, {"aux_hidden_state_layer_ids": [2, 4, 6]}, r"fc.weight has 64 columns.*feature_layers=\[2, 4, 6\]"),
        (DEEPSPEC, {"target_layer_ids": ...}, "target_layer_ids"),
        (DEEPSPEC, {"hidden_size": ...}, "hidden_size"),
        (DEEPSPEC, {"rope_theta": ..., "rope_parameters": ...}, "rope_theta"),
        ("zlab_llama", {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ]:
        with pytest.raises(ValueError, match=message):
            BlockDrafter.from_pretrained(edited(name, fields))


def test_tensors_that_do_not_belong_are_named(edited):
    for change, message in [
        (lambda state: state | {"layers.0.self_attn.qkv_proj.weight": torch.ones(2)}, "qkv_proj"),
        (lambda state: state | {"extra.weight": torch.ones(2)}, "extra.weight"),
        (lambda state: {key: each for key, each in state.items() if key != "norm.weight"}, "norm.weight"),
        (lambda state: state | {"d2t": state["d2t"] + torch.arange(56)}, "d2t"),
        (lambda state: state | {"d2t": state["d2t"][:-1]}, "d2t"),
    ]:
        with pytest.raises(ValueError, match=message):
            BlockDrafter.from_pretrained(edited(DSPARK, tensors=change))


def test_old_names_of_tensors_are_read(edited):
    heads = ("markov_head", "confidence_head")
    old = lambda state: {  # noqa: E731
        f"model.logit_head.{key}" if key.startswith(heads) else f"model.{key}": each for key, each in state.items()
    }
    base, drafter = pair(DEEPSPEC)
    wanted = drafts(base, drafter)
    assert drafts(base, BlockDrafter.from_pretrained(edited(DEEPSPEC, tensors=old), dtype=torch.float32)) == wanted
    books = lambda state: {f"{k}.weight" if k.endswith("codebook") else k: each for k, each in state.items()}  # noqa: E731
    assert BlockDrafter.from_pretrained(edited(DFLASH2, tensors=books)).law == "selector"


def test_backbones_that_it_was_not_made_for_are_refused(edited):
    for name, fields, message in [
        (DSPARK, {"aux_hidden_state_layer_ids": [2, 7]}, r"feature_layers=\[2, 7\].*0..6"),
        (DSPARK, {"mask_token_id": 96}, "mask_token_id=96.*0..95"),
        (DEEPSPEC, {"num_target_layers": 9}, "num_hidden_layers.*9.*7"),
    ]:
        base = AutoModelForCausalLM.from_pretrained(DATA / CASES[name], dtype=torch.float32)
        drafter = BlockDrafter.from_pretrained(edited(name, fields))
        with pytest.raises(ValueError, match=message):
            drafter.attach(base)
        with pytest.raises(ValueError, match="hidden_size|vocab_size|num_hidden_layers"):
            BlockDrafter.from_pretrained(DATA / name).attach(backbone())


def test_a_longer_block_is_refused_and_a_shorter_one_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr(layouts.logger, "warning_once", said.append)
    with pytest.raises(ValueError, match="block_size=7.*5"):
        BlockDrafter.from_pretrained(DATA / DSPARK, block_size=7)
    assert BlockDrafter.from_pretrained(DATA / DSPARK, block_size=3).num_drafts == 3 and "block_size=3" in said[0]


@torch.no_grad()
def test_an_embedding_of_the_mask_token_may_lie_beside_the_weights(edited, tmp_path):
    base, drafter = pair(DSPARK)
    context, last = torch.randn(1, 9, 32), torch.tensor([5])
    row = base.get_input_embeddings().weight[90].clone()
    for stored in (row, {"embedding": row, "mask_token_id": 90}):
        folder = edited(DSPARK)
        torch.save(stored, folder / "mask_embedding.pt")
        again = BlockDrafter.from_pretrained(folder, dtype=torch.float32).attach(base)
        torch.testing.assert_close(again.block(context, last).hidden, drafter.block(context, last).hidden)
    torch.save({"embedding": row + 1, "mask_token_id": 90}, folder / "mask_embedding.pt")
    other = BlockDrafter.from_pretrained(folder, dtype=torch.float32).attach(base)
    assert not torch.allclose(other.block(context, last).hidden, drafter.block(context, last).hidden, atol=1e-2)
    for stored, message in (
        ({"embedding": row, "mask_token_id": 3}, "mask_token_id=90.* 3"),
        (row[:5], "hidden_size"),
        ([1], "tensor"),
    ):
        torch.save(stored, folder / "mask_embedding.pt")
        with pytest.raises(ValueError, match=message):
            BlockDrafter.from_pretrained(folder)


def test_code_beside_a_checkpoint_is_never_run(edited):
    folder = edited(DSPARK, {"auto_map": {"": "config.DSparkSpeculatorConfig", "AutoModel": "config.Model"}})
    (folder / "config.py").write_text("raise SystemExit('this ran')\n")
    assert read_drafter(folder, trust_remote_code=True).num_drafts == 5


def test_names_of_others_lead_to_their_classes():
    assert drafter_class(DATA / DSPARK) is BlockDrafter
    with pytest.raises(ValueError):
        EagleHead.from_pretrained(DATA / DSPARK)
    with pytest.raises(OSError, match="nowhere"):
        BlockDrafter.from_pretrained("./nowhere")
    with pytest.raises(ValueError, match="model_type='llama'"):
        BlockDrafter.from_pretrained(DATA / "llama")


def test_tables_in_a_checkpoint_that_differ_from_the_backbones_are_used(edited):
    moved = lambda state: state | {"lm_head.weight": state["lm_head.weight"].flip(0)}  # noqa: E731
    base, drafter = pair(DEEPSPEC)
    again = BlockDrafter.from_pretrained(edited(DEEPSPEC, tensors=moved), dtype=torch.float32)
    assert drafts(base, again) != drafts(base, drafter)
    inputs, options = left_padded([IDS[0], IDS[0, :3]]), dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert base.generate(**inputs, **options, assistant_model=again).equal(base.generate(**inputs, **options))
