"""Commands take drafters in published layouts wherever they take a drafter."""

import pytest
import torch

from tests.every_model import llama
from tokenahead import EagleHead, EvaByteTokenizer, MTPHeads
from tokenahead.training.evaluation.decoding import methods_of
from tokenahead.training.requests import BenchRequest

LAYOUTS = {
    "eagle": {
        "official": lambda base: EagleHead.from_backbone(base, version=1),
        "specforge": lambda base: EagleHead.from_backbone(base, draft_vocab_size=64),
        "speculators": lambda base: EagleHead.from_backbone(base),
        "vllm": lambda base: EagleHead.from_backbone(base),
    },
    "heads": {
        "medusa": lambda base: MTPHeads.from_backbone(base, head_type="medusa", unembedding="own"),
        "vllm": lambda base: MTPHeads.from_backbone(base, head_type="medusa", unembedding="own"),
        "hydra": lambda base: MTPHeads.from_backbone(base, head_type="hydra", unembedding="own"),
        "gloeckle": lambda base: MTPHeads.from_backbone(base, head_type="layer"),
    },
}
EVERY = [(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    model = llama(vocab_size=320, num_hidden_layers=8, max_position_embeddings=512)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def root(backbone, tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    backbone.save_pretrained(root / "base")
    EvaByteTokenizer().save_pretrained(root / "base")
    for kind, layout in EVERY:
        drafter = LAYOUTS[kind][layout](backbone)
        drafter.export(root / f"{kind}-{layout}", layout)
        drafter.detach()
    return root


def test_methods_of_a_bench(backbone, root):
    specs = [f"{kind}:{root / f'{kind}-{layout}'}" for kind, layout in EVERY]
    specs += [f"c{index}=cascade:{spec.partition(':')[2]}" for index, spec in enumerate(specs)]
    methods, refused = methods_of(specs, backbone)
    assert not refused and len(methods) == 1 + len(specs)
    _, refused = methods_of([f"heads:{root / 'eagle-official'}", f"eagle:{root / 'base'}"], backbone)
    assert "EagleHead" in refused["heads:eagle-official"] and "'llama'" in refused["eagle:base"]


def test_layers_of_an_eagle_head_are_options_of_its_method(backbone, root):
    spec = f"eagle:{root / 'eagle-vllm'}?aux_layers=[1, 2, 3]&num_assistant_tokens=3"
    (_, method), refused = methods_of([spec], backbone)
    assert not refused and method.drafter.config.aux_layers == [1, 2, 3]
    assert method.options.keys() == {"assistant_model", "num_assistant_tokens"}


def test_the_help_of_bench_names_every_kind():
    with pytest.raises(ValueError, match="choose of") as refusal:
        methods_of(["none of these"], None)
    kinds = str(refusal.value).partition("choose of ")[2].split(", ")
    help_text = BenchRequest.__dataclass_fields__["methods"].metadata["help"].replace("[:SOURCE]", "")
    named = help_text.partition("of ")[2].partition(";")[0].split(", ")
    assert sorted(kinds) == sorted(named) and {"suffix", "cascade:SOURCE"} <= {*kinds}
