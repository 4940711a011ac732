"""The card: what it says, what it refuses to say, and when it may replace a README.md."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import LlamaConfig

from tests.families import family_model
from tests.ptp_models import student
from tokenahead import (
    BlockDrafter,
    BlockDrafterConfig,
    EagleHead,
    EagleHeadConfig,
    EvaByteForMTPC,
    MTPHeadConfig,
    PTPStudent,
)
from tokenahead.model_cards import render_card, write_card


@pytest.fixture
def model(config):
    return EvaByteForMTPC(config)


def table_row(card: ModelCard, label: str) -> list[str]:
    """The cells after `label` in the only table row that starts with it."""
    start = f"| {label} |"
    (line,) = [line for line in card.text.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line[len(start) :].strip("|").split("|")]


def test_says_what_the_model_is(model):
    card = render_card(model, None, repo_id="me/toy", license="mit", base_model="EvaByte/EvaByte")
    assert table_row(card, "Class") == ["`EvaByteForMTPC` (`model_type` `evabyte`)"]
    assert table_row(card, "Window") == ["4: the next token and 3 drafted"]
    assert table_row(card, "Parameters") == [f"{model.num_parameters():,}"]
    assert table_row(card, "Width") == ["32"]
    assert table_row(card, "Derived from") == ["`EvaByte/EvaByte`"]
    assert table_row(card, "License") == ["mit"]
    assert "\n# toy\n" in card.text
    assert 'EvaByteForMTPC.from_pretrained("me/toy")' in card.text


def test_measured_table_and_what_measured_it(model, results):
    card = render_card(model, results)
    sampled = ["200", "80", "2.50", "50.0", "20.0", "2.50", "not compared"]
    assert table_row(card, "greedy") == ["200", "50", "4.00", "100.0", "40.0", "2.50", "yes"]
    assert table_row(card, r"sampled, a \| b") == sampled
    assert table_row(card, "Accepted") == ["75 %", "50 %"]
    for shown in (results.hardware, results.command, results.dataset_description, "Bytes per call", "prompts: 8"):
        assert shown in card.text
    assert "Bits per byte of the next-token head: 2.125" in card.text
    assert "Nothing has been measured" not in card.text


def test_spread_expectation_and_repetition_are_shown_and_loops_claim_no_speed(model, results, row):
    kept = {"per_prompt": [3.0, 5.0], "expected_tokens_per_call": 3.5, "accepted_by_position": [0.5, 0.25, 0.125]}
    looping = dataclasses.replace(results.results[1], repeated_share=0.75)
    rows = [dataclasses.replace(row, repeated_share=0.125, **kept), looping]
    card = render_card(model, dataclasses.replace(results, results=rows, environment={"torch": "2.13", "threads": 2}))
    assert table_row(card, "greedy")[5:] == ["2.50", "yes", "3.00 to 5.00", "3.50", "12 %"]
    assert table_row(card, r"sampled, a \| b")[5:] == ["not claimed", "not compared", "-", "-", "75 %"]
    assert table_row(card, "Accepted, greedy") == ["50 %", "25 %", "12 %"]
    kept |= {"draft_length": 5, "tokens_per_verification": 3.6, "standard_error": 0.1, "expected_standard_error": 0.04}
    whole = render_card(model, dataclasses.replace(results, results=[dataclasses.replace(row, **kept)]))
    assert table_row(whole, "greedy")[-1] == "3.50 ± 0.04 (drafts of 5); decoded 3.60 ± 0.10"
    assert "torch 2.13; threads 2\n" in card.text
    assert [e.metric_name for e in card.data.eval_results if e.metric_type == "speed_up"] == [
        "Speed-up over one byte at a time, greedy"
    ]


@pytest.mark.parametrize(("variant", "drafted"), [("one_hot", 2), ("categorical", 3), ("mask", 3)])
def test_parallel_prediction_says_what_its_slots_were_learned_for(variant, drafted, results):
    model = student(variant, sampling={"top_p": 0.9})
    card = render_card(model, results, repo_id="me/parallel")
    assert table_row(card, "Drafts")[0].startswith(f"`{variant}`: ")
    assert table_row(card, "Slots") == [f"3: {drafted} drafted besides the next token"]
    assert table_row(card, "Learned for") == ["temperature 1.0, top_k 0, top_p 0.9"]
    assert table_row(card, "Width") == ["16"]  # the backbone's
    for shown in ('PTPForCausalLM.from_pretrained("me/parallel")', "seed=7", "learned for one distribution"):
        assert shown in card.text and "Alone it writes nothing" not in card.text
    of_config = render_card(model.config, None)
    assert table_row(of_config, "Class") == ["`PTPForCausalLM` (`model_type` `ptp`)"]
    assert "| Parameters |" not in of_config.text
    apart = render_card(PTPStudent.from_model(model), results, repo_id="me/adapters", base_model="them/backbone")
    for shown in ('PTPStudent.from_pretrained("me/adapters").attach(backbone)', "Alone it writes nothing"):
        assert shown in apart.text


def test_near_ties_are_told_from_differences(model, results, row):
    kinds = [dataclasses.replace(row, identical=False, texts=9, differing=4, near_ties=ties) for ties in (4, 3)]
    tokens = dataclasses.replace(results, unit="token")
    near, other = (render_card(model, dataclasses.replace(tokens, results=[each])) for each in kinds)
    assert table_row(near, "greedy")[6] == "5 of 9, the rest near-ties"
    assert table_row(other, "greedy")[6] == "**no**" and "| Backbone calls | Tokens per call |" in other.text


def test_without_results_nothing_is_claimed(model):
    card = render_card(model, None)
    assert "**Nothing has been measured for this card.**" in card.text
    assert "Speed-up" not in card.text
    assert card.data.eval_results is None
    assert "was not described" in card.text
    assert table_row(card, "License") == ["none stated"]


def test_metadata_round_trip(model, results):
    card = render_card(model, results, license="mit", model_name="Toy", language="code", tags=["bytes"])
    data = ModelCard(str(card)).data
    assert {"tokenahead", "multi-token-prediction", "speculative-decoding", "evabyte", "bytes"} == set(data.tags)
    assert (data.pipeline_tag, data.library_name) == ("text-generation", "transformers")
    assert (data.license, data.language, data.model_name) == ("mit", "code", "Toy")
    with pytest.raises(TypeError, match="LlamaConfig"):
        render_card(LlamaConfig(), None)
    figures = {(entry.metric_type, entry.metric_name): entry.metric_value for entry in data.eval_results}
    assert len(figures) == 7
    assert figures["tokens_per_call", "Bytes per backbone call, greedy"] == 4.0
    assert figures["bits_per_byte", "Bits per byte"] == 2.125
    assert {entry.dataset_type for entry in data.eval_results} == {"held-out-code"}


@pytest.mark.parametrize("travels", ["bundle", None])
def test_use_without_the_library_is_shown_where_its_code_travels(model, travels):
    card = render_card(model, None, repo_id="me/toy", remote_code=travels)
    assert card.data.library_name == ("transformers" if travels == "bundle" else "tokenahead")
    shown = 'AutoModelForCausalLM.from_pretrained("me/toy", trust_remote_code=True)' in card.text
    assert shown == (travels == "bundle") == ("pip install torch 'transformers>=" in card.text)
    assert "pip install ./tokenahead" in card.text


SECTIONS = (
    "Model Details", "Uses", "Direct Use", "Out-of-Scope Use", "How to Get Started with the Model", "Training Details",
    "Training Data", "Training Procedure", "Evaluation", "Bias, Risks, and Limitations", "Recommendations", "Citation",
)  # fmt: skip


@pytest.mark.by_day("eagle", "mask")
@pytest.mark.parametrize("kind", ["model", "eagle", "block", "ptp", "mask", "modules"])
def test_parts_of_the_annotated_template(kind, model, results):
    found = {"model": model, "ptp": student(), "mask": student("mask"), "modules": family_model("llama")}
    found["eagle"] = EagleHead(EagleHeadConfig(hidden_size=16, num_attention_heads=2, vocab_size=64))
    sizes = dict(hidden_size=16, num_attention_heads=2, head_dim=8, intermediate_size=16, num_hidden_layers=1)
    found["block"] = BlockDrafter(BlockDrafterConfig(**sizes, vocab_size=64, feature_layers=[1], mask_token_id=63))
    texts = {"training_data": "Novels.", "training_description": "Slowly.", "out_of_scope": "- Poems."}
    texts |= {"hyperparameters": {"learning_rate": 0.001}, "language": "en"}
    card = render_card(found[kind], results, remote_code="bundle", **texts)
    headings = [line.lstrip("# ") for line in card.text.splitlines() if line.startswith("##")]
    assert set(SECTIONS) <= set(headings)
    for shown in ("Novels.", "Slowly.", "- Poems.", "learning_rate: 0.001", "@article{"):
        assert shown in card.text
    assert (card.data.language, table_row(card, "Language(s)")) == ("en", ["en"])
    papers = {"model": "2404.19737", "eagle": "2503.01840", "ptp": "2512.21323", "modules": "2412.19437"}
    paper = (papers | {"mask": "2507.11851", "block": "2602.06036"})[kind]
    assert f"arXiv:{paper}" in card.text
    assert ("peft" in card.text) == (kind in ("ptp", "mask"))
    assert ("AutoModel.from" in card.text) == (kind in ("eagle", "block"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_model", "/home/somebody/base"),
        ("training_description", "Trained from ~/runs/3."),
        ("training_data", "See C:\\data\\corpus."),
        ("training_data", f"See {Path(__file__)}."),
        ("hyperparameters", {"output": "/tmp/out"}),
    ],
)
def test_paths_of_a_machine_are_refused_by_name(model, field, value):
    with pytest.raises(ValueError, match="path"):
        render_card(model, None, **{field: value})


def test_addresses_and_fractions_are_no_paths(model):
    text = "See https://example.org/home/x/y, 3/4 of 1/2/3, and/or `/v1/completions`, src/a/b.py."
    assert text in render_card(model, None, training_description=text).text


def test_heads_apart_are_attached_to_their_backbone():
    config = MTPHeadConfig(window=4, hidden_size=32, vocab_size=320, base_model_name_or_path="me/base")
    card = render_card(config, None, repo_id="me/heads")
    assert (card.data.base_model, card.data["base_model_relation"]) == ("me/base", "adapter")
    assert card.data.get("pipeline_tag") is None  # alone they write nothing
    assert 'MTPHeads.from_pretrained("me/heads").attach(backbone)' in card.text


@pytest.mark.parametrize("name", ["/home/someone/base", "runs/base"])
def test_path_of_a_backbone_is_not_published(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "base").mkdir(parents=True)
    card = render_card(MTPHeadConfig(window=4, hidden_size=32, vocab_size=320, base_model_name_or_path=name), None)
    assert name not in str(card)
    assert card.data.base_model is None


def test_card_replaces_its_own_older_version(model, results, tmp_path):
    write_card(tmp_path, render_card(model, None))
    path = write_card(tmp_path, render_card(model, results))
    assert path == tmp_path / "README.md"
    assert "tokenahead demo --seed 3" in path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: "---\n: not yaml [\n---\n# My own words\n",
        lambda text: text.replace("license: mit", "license: gpl-3.0"),
        lambda text: text + "\nA last word.\n",
    ],
)
def test_hand_written_card_is_kept(model, results, tmp_path, edit):
    path = write_card(tmp_path, render_card(model, None, license="mit"))
    own = edit(path.read_text())
    path.write_text(own)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_card(tmp_path, render_card(model, results))
    assert path.read_text() == own
    write_card(tmp_path, render_card(model, results), overwrite=True)
    assert "tokenahead demo --seed 3" in path.read_text()


def test_released_cards_were_not_edited(tmp_path):
    cards = [*Path(__file__).parents[2].glob("model_cards/*/**/README.md")]
    for card in cards:
        shutil.copyfile(card, tmp_path / "README.md")
        write_card(tmp_path, ModelCard("new"))  # which refuses to replace one that was edited
    assert len(cards) == 4
