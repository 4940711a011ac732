"""Drafters that stand apart, as engines serve them: the command, and what was checked."""

import json
import shlex

import pytest

from tests.modeling.heads.backbones import KINDS, backbone
from tokenahead import BlockDrafter, EagleHead, MTPHeads
from tokenahead.model_cards import vllm
from tokenahead.model_cards.export import export


def options_of(command, name):
    words = shlex.split(command)
    return json.loads(words[words.index(name) + 1])


@pytest.mark.parametrize("kind", [{}, {"unembedding": "own"}, KINDS["medusa"], KINDS["medusa-own"]], ids=str)
def test_independent_and_medusa_heads_are_medusa_s(kind, tmp_path):
    heads = MTPHeads.from_backbone(backbone(), window=4, **kind)
    report = export(heads, tmp_path)
    wanted = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 3}
    assert options_of(report.command, "--speculative-config") == wanted
    assert "were run in vLLM 0.32.0" in str(report) and report.command.startswith("vllm serve BACKBONE ")


@pytest.mark.parametrize("kind", ["cp", "hmm", "btree"])
def test_circuits_go_through_the_proposer(kind, tmp_path):
    report = export(MTPHeads.from_backbone(backbone(), window=4, head_type=kind, rank=2), tmp_path)
    speculative = options_of(report.command, "--speculative-config")
    assert speculative["method"] == "custom_class" and speculative["num_speculative_tokens"] == 3
    assert options_of(report.command, "--additional-config") == {"tokenahead_heads": str(tmp_path)}
    module, _, name = speculative["model"].rpartition(".")
    assert module == "tokenahead.model_cards.vllm" and getattr(vllm, name)
    assert "pip install --no-deps PATH" in str(report) and MTPHeads.from_pretrained(tmp_path).window == 4


@pytest.mark.parametrize(("law", "method"), [("independent", "dflash"), ("markov", "dspark")])
def test_block_drafters(law, method, tmp_path):
    drafter = BlockDrafter.from_backbone(backbone(num_hidden_layers=4), law=law, layers=1)
    report = export(drafter, tmp_path, "vllm")
    assert f'"method": "{method}"' in report.command and '"num_speculative_tokens": 8' in report.command
    assert report.checked == "the layout follows vllm's loader, which was read and not run"
    assert BlockDrafter.from_pretrained(tmp_path).config.layout == "speculators"
    with pytest.raises(ValueError, match="engine='sglang'"):
        export(drafter, tmp_path / "other", "sglang")


@pytest.mark.core_cases("1-eagle")
@pytest.mark.parametrize(("version", "method"), [(1, "eagle"), (3, "eagle3")])
def test_eagle_heads(version, method, tmp_path):
    head = EagleHead.from_backbone(backbone(num_hidden_layers=4), version=version)
    report = export(head, tmp_path / "vllm")
    assert options_of(report.command, "--speculative-config")["method"] == method
    if version == 3:
        assert head.config.aux_layers == [1, 2, 3]  # three states that differ: vLLM hands over each one once
        head.config.aux_layers = [2, 3, 4]
    other = export(head, tmp_path / "sglang", "sglang")
    assert "read and not run" in str(other) and "--speculative-draft-model-path" in other.command


def test_states_that_vllm_would_hand_over_otherwise_are_refused(tmp_path):
    for ids in ([2, 2, 3], [3, 2, 1]):
        head = EagleHead.from_backbone(backbone(num_hidden_layers=4), version=3, aux_layers=ids)
        with pytest.raises(ValueError, match="aux_layers"):
            export(head, tmp_path / "out")


@pytest.mark.core
def test_what_engines_cannot_run_is_refused_by_name(tmp_path):
    for kind, reads in (("hydra", "embeddings"), ("layer", "positions")):
        heads = MTPHeads.from_backbone(backbone(), window=3, **KINDS[kind])
        with pytest.raises(ValueError, match=f"head_type='{kind}'.*{reads}"):
            export(heads, tmp_path / "out")
    with pytest.raises(ValueError, match="draft layers"):
        export(MTPHeads.from_backbone(backbone(), window=3, draft_layers=1), tmp_path / "out")
    with pytest.raises(ValueError, match="engine='sglang'"):
        export(MTPHeads.from_backbone(backbone(), window=3), tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()
