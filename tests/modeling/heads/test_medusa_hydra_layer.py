"""Medusa, Hydra and layer heads: their formulas by hand, where they start, what they learn, what is refused."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, Qwen3Config

from tests.families import family_config
from tests.modeling.heads.backbones import KINDS, backbone, shaken
from tokenahead import MTPHeadConfig, MTPHeads
from tokenahead.modeling.common import chunks

IDS = torch.randint(2, 64, (2, 11), generator=torch.Generator().manual_seed(0))


def made(kind, base=None, **changes):
    base = backbone() if base is None else base
    return base, shaken(MTPHeads.from_backbone(base, window=4, **(KINDS[kind] | changes))).eval()


@torch.no_grad()
def test_medusa_by_hand():
    base, heads = made("medusa-own")
    out, names = base(IDS, output_hidden_states=True), heads.state_dict()
    state, rows = out.hidden_states[-1], [out.logits]
    for k in range(3):
        u = state
        for _ in range(2):
            block = names[f"head.blocks.{k}.0.linear.weight"], names[f"head.blocks.{k}.0.linear.bias"]
            u = u + silu(linear(u, *block))
        rows.append(linear(u, names[f"head.unembeddings.heads.{k}.weight"]))
    want = torch.stack(rows, 2).log_softmax(-1)
    got = heads.distribution(IDS).conditional_log_probs(torch.zeros(2, 11, 4, dtype=torch.long))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_hydra_by_hand():
    base, heads = made("hydra")
    out, names = base(IDS, output_hidden_states=True), heads.state_dict()
    tokens = torch.randint(2, 64, (2, 11, 4), generator=torch.Generator().manual_seed(1))
    state, embedded = out.hidden_states[-1], base.get_input_embeddings()(tokens)
    rows = [out.logits]
    for k in range(3):
        u = torch.cat([state, embedded[:, :, : k + 1].flatten(2)], -1)
        parts = [names[f"head.firsts.{k}.{name}.{part}"] for name in ("res_connection", "linear")
                 for part in ("weight", "bias")]  # fmt: skip
        u = linear(u, *parts[:2]) + silu(linear(u, *parts[2:]))
        u = u + silu(linear(u, names[f"head.blocks.{k}.0.linear.weight"], names[f"head.blocks.{k}.0.linear.bias"]))
        rows.append(base.lm_head(u))
    want = torch.stack(rows, 2).log_softmax(-1)
    torch.testing.assert_close(heads.distribution(IDS).conditional_log_probs(tokens), want, atol=1e-5, rtol=0)


@pytest.mark.core
@torch.no_grad()
def test_weighted_layer_heads_are_the_backbone_with_another_last_layer():
    base, heads = made("layer-weighted")
    states = base(IDS, output_hidden_states=True).hidden_states
    shares = (heads.head.mix / heads.config.mix_temperature).softmax(-1)
    distribution, last = (
        heads.distribution(IDS).conditional_log_probs(torch.zeros(2, 11, 4, dtype=torch.long)),
        base.model.layers[-1],
    )
    for k, layer in enumerate(heads.head.layers):
        mixed = shares[k, 0] * states[1] + shares[k, 1] * states[2]
        handle = last.register_forward_pre_hook(lambda module, args, new=mixed: (new, *args[1:]))
        own = {name: value.clone() for name, value in last.state_dict().items()}
        last.load_state_dict(layer.state_dict())
        want = base(IDS).logits.log_softmax(-1)
        last.load_state_dict(own)
        handle.remove()
        torch.testing.assert_close(distribution[:, :, k], want, atol=1e-4, rtol=0)


@pytest.mark.by_day("GPTNeoXConfig")
@pytest.mark.parametrize("family", [Gemma3TextConfig, GPTNeoXConfig, Qwen3Config], ids=lambda family: family.__name__)
@torch.no_grad()
def test_new_layers_start_as_the_last_layer_of_any_family(family):
    base = backbone(family)
    heads = MTPHeads.from_backbone(base, window=3, head_type="layer", first="own")
    got = heads.distribution(IDS).conditional_log_probs(torch.zeros(2, 11, 3, dtype=torch.long))
    want = base(IDS).logits.log_softmax(-1)[:, :, None].expand(-1, -1, 3, -1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("first", ["own", "backbone"])
def test_random_layers_start_apart_but_for_the_next_token(first):
    base = backbone()
    layers = MTPHeads.from_backbone(base, window=3, head_type="layer", first=first, init="random").head.layers
    parts = torch.stack([layer.mlp.up_proj.weight for layer in (*layers, base.model.layers[-1])]).flatten(1)
    equal = (parts[:, None] == parts[None]).all(-1)
    want = torch.eye(len(parts), dtype=torch.bool)
    want[0, -1] = want[-1, 0] = first == "own"
    assert torch.equal(equal, want)
    torch.testing.assert_close(parts[1:-1].std(1), torch.full((len(parts) - 2,), 0.02), atol=2e-3, rtol=0)


@torch.no_grad()
def test_padding_changes_no_distribution():
    for kind in KINDS:
        _, heads = made(kind)
        tokens = torch.randint(2, 64, (1, 8, 4), generator=torch.Generator().manual_seed(1))
        alone = heads.distribution(IDS[:1, :8]).conditional_log_probs(tokens)
        for before in (0, 3):
            padded = torch.nn.functional.pad(IDS[:1, :8], (before, 3 - before))
            mask = torch.nn.functional.pad(torch.ones(1, 8, dtype=torch.long), (before, 3 - before))
            wide = torch.nn.functional.pad(tokens, (0, 0, before, 3 - before))
            got = heads.distribution(padded, attention_mask=mask).conditional_log_probs(wide)[mask.bool()]
            torch.testing.assert_close(got, alone[0], atol=1e-4, rtol=0)


@pytest.mark.by_day("medusa-own", "hydra-ungrounded", "hydra++", "layer-weighted")
@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_every_weight_of_the_heads_and_none_of_the_backbone(kind, tmp_path):
    base, heads = made(kind)
    frozen, before = base.state_dict(), {name: value.clone() for name, value in heads.state_dict().items()}
    frozen = {name: value.clone() for name, value in frozen.items()}
    heads.train()
    optimizer, losses = torch.optim.Adam(heads.parameters(), lr=3e-3), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = heads(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(parameter.grad is None for parameter in base.parameters())
    assert all(torch.equal(value, frozen[name]) for name, value in base.state_dict().items())
    assert [name for name, value in heads.state_dict().items() if torch.equal(value, before[name])] == []
    heads.save_pretrained(tmp_path)
    again = MTPHeads.from_pretrained(tmp_path)
    assert all(torch.equal(value, heads.state_dict()[name]) for name, value in again.state_dict().items())
    assert again.config.loss_target == heads.config.loss_target


@pytest.mark.by_day("labels-medusa-own", "teacher-hydra++")
@pytest.mark.parametrize("kind", ["medusa-own", "hydra++", "layer-weighted"])
@pytest.mark.parametrize("target", ["labels", "teacher"])
def test_chunks_change_no_gradient(kind, target, monkeypatch):
    _, heads = made(kind, loss_options={"target": target})
    found = []
    for size in (2**24, 5 * 4 * 64 * (1 + (target == "teacher"))):
        monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", size)
        heads.zero_grad()
        out = heads(IDS, labels=IDS)
        out.loss.backward()
        found.append([out.loss.detach(), out.head_losses, *(parameter.grad for parameter in heads.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.core
def test_losses_are_weighed_taught_and_balanced_as_defined():
    base, heads = made("medusa", loss_options={"weights": [0.5, 1.0, 2.0, 4.0]})
    with torch.no_grad():
        distribution = heads.distribution(IDS).conditional_log_probs(torch.zeros(2, 11, 4, dtype=torch.long))
        target = base(IDS).logits.softmax(-1)
    terms = [-distribution[:, : 10 - k, k].gather(-1, IDS[:, k + 1 :, None])[..., 0] for k in range(4)]
    means = torch.stack([part.mean() for part in terms])
    weights = torch.tensor(heads.config.loss_weights)
    out = heads(IDS, labels=IDS)
    torch.testing.assert_close(out.loss.detach(), (weights * means).sum(), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.head_losses, means, atol=1e-4, rtol=0)
    spread = torch.stack([part.square().mean().sqrt() for part in terms])
    heads.config.loss_balance = "rms"
    balanced = (weights * means * spread[0] / spread).sum()
    torch.testing.assert_close(heads(IDS, labels=IDS).loss.detach(), balanced, atol=1e-4, rtol=0)
    heads.config.loss_target = "teacher"
    taught = [-(target[:, k:-1] * distribution[:, : 10 - k, k]).sum(-1).mean() for k in range(1, 4)]
    got = heads(IDS, labels=IDS).head_losses
    torch.testing.assert_close(got, torch.stack([means[0], *taught]), atol=1e-4, rtol=0)


def test_contradictory_options_are_refused_by_name():
    for options, message in [
        ({"head_type": "medusa", "mix": "weighted"}, "mix=weighted"),
        ({"head_type": "layer", "num_blocks": 2}, "num_blocks=.*2"),
        ({"head_type": "medusa", "init": "random"}, "init=random"),
        ({"head_type": "medusa", "loss_options": {"weights": [1.0]}}, "one entry per depth"),
        ({"head_type": "hydra", "arch": "eagle-attn"}, "arch='eagle-attn'"),
    ]:
        with pytest.raises(StrictDataclassError, match=message):
            MTPHeadConfig(window=4, **options)


def test_a_backbone_without_fitting_layers_is_refused_by_name():
    with pytest.raises(ValueError, match="model_type='gpt2'"):
        MTPHeads.from_backbone(backbone(GPT2Config, n_embd=32, n_layer=2, n_head=2), head_type="layer")


def test_heads_that_read_more_than_one_state_say_which_method_gives_their_distribution():
    for kind in ("hydra++", "layer", "hydra-ungrounded"):
        _, heads = made(kind)
        with pytest.raises(ValueError, match="input_ids"):
            heads.window_distribution(torch.zeros(1, 32))


def test_a_layer_that_needs_others_is_refused():
    for options in [{"head_type": "layer"}, {"draft_layers": 1}]:
        for name, kind in [("qwen3_next", "linear_attention"), ("glm_moe_dsa", "indexed_attention")]:
            model = AutoModelForCausalLM.from_config(family_config(name, vocab_size=48))
            with pytest.raises(ValueError, match=f"{name}.*{kind}"):
                MTPHeads.from_backbone(model, window=3, **options)
