"""A head family that is defined outside of the library: one `register(...)` makes it as good as a built-in one."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from tests.modeling.heads.backbones import backbone, shaken
from tokenahead import MTPHeadConfig, MTPHeads
from tokenahead.configuration.head_families import HEAD_FAMILIES, HeadFamilyFacts
from tokenahead.model_cards import render_card
from tokenahead.model_cards.export import export
from tokenahead.modeling.heads.circuit_head import factorised_distribution
from tokenahead.modeling.heads.family import FAMILIES, HeadFamily, register
from tokenahead.modeling.heads.joint import JointMTPModel

IDS = torch.randint(2, 64, (2, 11), generator=torch.Generator().manual_seed(0))
NAME = "narrow"
PAPER = "@article{narrow,\n  title={Narrow Heads}\n}"


class NarrowHead(nn.Module):
    """Position 1 is the backbone's own; position k is W (h + B_k A_k h)."""

    def __init__(self, config, hidden_size, vocab_size):
        super().__init__()
        self.vocab_size, width = vocab_size, config.bottleneck
        self.down = nn.Parameter(torch.zeros(config.num_drafts, width, hidden_size))
        self.up = nn.Parameter(torch.zeros(config.num_drafts, hidden_size, width))

    def forward(self, hidden_states, backbone, start=0, stop=None):
        change = torch.einsum("kdr,kre,...e->...kd", self.up, self.down, hidden_states)
        states = torch.cat([hidden_states.unsqueeze(-2), hidden_states.unsqueeze(-2) + change], -2)
        return backbone.unembed(states[..., start:stop, :])

    def reset_head(self, std):
        nn.init.normal_(self.down, std=std)


def check(config):
    if config.bottleneck < 1:
        raise ValueError(f"bottleneck={config.bottleneck} must be at least 1")


def facts(**changes):
    options = {"borrows_first": lambda config: True, "apart_only": True} | changes
    return HeadFamilyFacts(
        NAME,
        "heads of width {bottleneck}",
        "N. 2026",
        paper=PAPER,
        defaults={"bottleneck": 4},
        check=check,
        **options,
    )


@pytest.fixture
def registered():
    def add(family_facts=None, **changes):
        options = {"is_independent": True} | changes
        return register(HeadFamily(family_facts or facts(), NarrowHead, factorised_distribution, **options))

    yield add
    HEAD_FAMILIES.pop(NAME, None)
    FAMILIES.pop(NAME, None)


def made(**options):
    base = backbone()
    return base, shaken(MTPHeads.from_backbone(base, window=4, head_type=NAME, **options)).eval()


def test_a_registered_family_learns_drafts_and_is_saved(registered, tmp_path):
    registered()
    base, heads = made(bottleneck=6)
    before = [parameter.clone() for parameter in heads.parameters()]
    optimizer = torch.optim.Adam(heads.parameters(), lr=1e-3)
    first = heads.train()(IDS, labels=IDS).loss
    first.backward()
    optimizer.step()
    assert heads(IDS, labels=IDS).loss < first
    assert not any(map(torch.equal, heads.parameters(), before))
    options = {"max_new_tokens": 12, "do_sample": False}
    heads.eval()
    drafted = base.generate(IDS, assistant_model=heads, return_dict_in_generate=True, **options)
    assert torch.equal(drafted.sequences, base.generate(IDS, **options)) and drafted.speculation.accepted
    heads.save_pretrained(tmp_path)
    again = MTPHeads.from_pretrained(tmp_path).attach(base)
    assert again.config.bottleneck == 6
    assert all(torch.equal(value, heads.state_dict()[name]) for name, value in again.state_dict().items())
    assert torch.equal(base.generate(IDS, assistant_model=again, **options), drafted.sequences)


def test_a_borrowed_first_position_is_charged_once(registered):
    registered()
    _, heads = made()
    joint, alone = JointMTPModel(heads), heads(IDS, labels=IDS)
    out = joint(IDS, labels=IDS)
    torch.testing.assert_close(out.backbone_loss, alone.head_losses[0])
    weights = 0.9 ** torch.arange(4) / (0.9 ** torch.arange(4)).sum()
    expected = out.backbone_loss + (weights * alone.head_losses)[1:].sum()
    torch.testing.assert_close(out.loss, expected)


def test_its_card_says_what_the_record_says(registered):
    registered()
    _, heads = made()
    text = str(render_card(heads, None))
    assert "heads of width 4" in text and "N. 2026" in text and "title={Narrow Heads}" in text


@pytest.mark.core
def test_its_export_is_answered_by_what_it_reads(registered, tmp_path):
    registered()
    _, heads = made()
    report = export(heads, tmp_path / "out")
    assert "custom_class" in report.command and any(NAME in warning for warning in report.warnings)
    assert "were run in vLLM" not in report.checked
    with pytest.raises(ValueError, match="layout='medusa'"):
        heads.export(tmp_path / "medusa", "medusa")


@pytest.mark.parametrize(
    ("changes", "reads"), [({"hidden_layers": lambda config: [-2, -1]}, r"\[-2, -1\]"), ({}, "embeddings")]
)
def test_its_export_is_refused_for_what_it_reads(changes, reads, registered, tmp_path):
    registered(None if changes else facts(sequential=True), **changes)
    _, heads = made()
    with pytest.raises(ValueError, match=f"{NAME}.*{reads}"):
        export(heads, tmp_path / "out")


def test_options_of_its_own_are_checked_and_a_name_is_taken_once(registered):
    with pytest.raises(StrictDataclassError, match=f"head_type='{NAME}'"):
        MTPHeadConfig(head_type=NAME, window=3)
    registered()
    assert MTPHeadConfig(head_type=NAME, window=3).options()["bottleneck"] == 4
    with pytest.raises(StrictDataclassError, match="bottleneck=0"):
        MTPHeadConfig(head_type=NAME, window=3, bottleneck=0)
    with pytest.raises(TypeError, match="bottleneck"):
        MTPHeads.from_backbone(backbone(), head_type="ff", bottleneck=2)
    with pytest.raises(ValueError, match=NAME):
        registered()
