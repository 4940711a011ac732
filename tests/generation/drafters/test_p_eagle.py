"""P-EAGLE heads: all tokens of a draft but the first come from rows of a mask token, which run at once."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.backbones import backbone, code, code_prompts, learn
from tests.models import left_padded
from tokenahead import EagleHead
from tokenahead.testing import continuation_distribution, continuation_p_value

DRAFT = 4


def at_once(head, text, place, count=DRAFT):
    """Logits [B, count, Vd] after `text[:, : place + 1]`: one forward of all pairs and masked rows, without a cache."""
    with torch.no_grad():
        states = head.backbone(text[:, :place], output_hidden_states=True).hidden_states
    masked, ids = head.masked(len(text), count - 1)
    features, ids = torch.cat([head.fuse(states), masked], 1), torch.cat([text[:, 1 : place + 1], ids], 1)
    return head.draft_logits(head.rows(features, ids)[:, -count:])


def taught(model, text, **options):
    """An attached head that learned to draft a text [N, L] so; of a draft vocabulary, the first ids."""
    torch.manual_seed(5)
    size = model.config.vocab_size
    head = EagleHead.from_backbone(model, aux_layers=[0, 1, 2], mask_token_id=size - 1, **options)
    generator, optimizer = torch.Generator().manual_seed(4), torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(80):
        place = int(torch.randint(1, text.shape[1] - DRAFT, (), generator=generator))
        logits, goal = at_once(head, text, place), text[:, place + 1 : place + 1 + DRAFT]
        optimizer.zero_grad()
        goal = goal.masked_fill(goal >= logits.shape[-1], -100)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), goal.flatten()).backward()
        optimizer.step()
    return head.eval()


@cache
def coder():
    model = learn(backbone(), code(), 60)
    head = taught(model, code()[: 24 * 60].view(60, 24), num_hidden_layers=2, fc_norm=True)
    return model, head.detach()


@pytest.fixture
def pair():
    model, head = coder()
    yield model, head.attach(model)
    head.detach()


def test_drafts_are_those_of_one_forward(pair):
    """Every draft of every row of a ragged batch is made again from that row's own finished text."""
    model, head = pair
    batch, new, seen = code_prompts(5), 30, set()
    options = dict(max_new_tokens=new, do_sample=False, num_assistant_tokens=DRAFT, return_dict_in_generate=True)
    out = model.generate(**left_padded(batch), assistant_model=head, **options)
    for row, prompt in enumerate(batch):
        text, place = torch.cat([prompt, out.sequences[row, -new:]])[None], len(prompt)
        for draft, accepted in zip(out.speculation.rows_drafts[row], out.speculation.rows_accepted[row]):
            if draft:
                assert draft == at_once(head, text, place, len(draft)).argmax(-1)[0].tolist()
            place, seen = place + accepted + 1, seen | {accepted}
    assert len(seen) > 3


@pytest.mark.by_day("block-processors0")
@pytest.mark.parametrize(
    ("rule", "processors"), [("block", {}), ("token", {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2})]
)
def test_sampled_distribution_of_ragged_rows(rule, processors):
    model, options = backbone(vocabulary=6, seed=2), {"top_k": 0} | processors
    starts = torch.randint(1, 5, (32, 2), generator=torch.Generator().manual_seed(4))
    text = model.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=16, do_sample=False)
    head = taught(model, text, draft_ids=torch.arange(5))
    batch = [torch.tensor([1, 3, 2, 4, 3, 2, 2, 4]), torch.tensor([4, 1, 3])]
    out = model.generate(
        **left_padded(batch * 1_200), do_sample=True, max_new_tokens=6, assistant_model=head, verification=rule,
        num_assistant_tokens=3, return_dict_in_generate=True, **options,
    )  # fmt: skip
    head.detach()
    assert {count for row in out.speculation.rows_accepted for count in row} == {0, 1, 2, 3}
    for row, prompt in enumerate(batch):
        distribution = continuation_distribution(model, prompt[None], 2, **options)
        assert continuation_p_value(out.sequences[row::2, 8:10], distribution) > 0.001


@pytest.mark.by_day("pard_token")
@pytest.mark.parametrize("name", ["ptd_token_id", "pard_token", "mask_token_id"])
def test_folders_that_vllm_reads(pair, tmp_path, name):
    """Its loader takes `mask_hidden` in any shape, and the token by one of several names."""
    model, head = pair
    head.export(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert tensors["mask_hidden"].numel() == 3 * 32 and config["ptd_token_id"] == 47
    config[name] = config.pop("ptd_token_id")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"mask_hidden": tensors["mask_hidden"].view(3, 32)}, tmp_path / "model.safetensors")
    loaded = EagleHead.from_pretrained(tmp_path)
    assert torch.equal(loaded.mask_hidden, head.mask_hidden) and loaded.config.mask_token_id == 47
    loaded.save_pretrained(tmp_path / "again")
    again = EagleHead.from_pretrained(tmp_path / "again")
    assert "ptd_token_id" in (tmp_path / "again" / "config.json").read_text()
    found = []
    for each in (head, loaded, again):
        options = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
        out = model.generate(**left_padded(code_prompts(4)), assistant_model=each.attach(model), **options)
        found.append(out.speculation.rows_drafts)
        if each is not head:
            each.detach()
    assert found[0] == found[1] == found[2]
    del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="mask_hidden.*ptd_token_id"):
        EagleHead.from_pretrained(tmp_path)


def test_its_loss_is_that_of_its_drafts_at_every_place(pair):
    model, head = pair
    head.train().loss_options.update(steps=DRAFT, decay=0.8, divergence="kl", kept=1.0)
    text = code()[: 2 * 12].view(2, 12)
    log_p = model(text).logits.log_softmax(-1)
    sums, counts = torch.zeros(DRAFT), torch.zeros(DRAFT)
    for place in range(1, 11):
        log_q = at_once(head, text, place).log_softmax(-1)  # [B, m, V]
        for step in range(min(DRAFT, 11 - place)):
            goal = log_p[:, place + step]
            sums[step] += (goal.exp() * (goal - log_q[:, step])).sum().detach()
            counts[step] += len(text)
    want = sums / counts
    out = head(text, labels=text)
    torch.testing.assert_close(out.step_losses, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.loss, (want * 0.8 ** torch.arange(DRAFT)).sum(), atol=1e-4, rtol=1e-4)
    head.zero_grad()
    out.loss.backward()
    assert head.mask_hidden.grad.abs().sum() > 0


def test_fewer_rows_have_the_same_loss_and_gradient_in_the_mean(pair):
    model, head = pair
    text = code()[: 2 * 24].view(2, 24)
    head.train().loss_options.update(steps=DRAFT, divergence="kl", kept=1.0)

    def gradients():
        head.zero_grad()
        loss = head(text, labels=text).loss
        loss.backward()
        return torch.stack([loss.detach(), *(part.grad.norm() for part in (head.mask_hidden, head.fc.weight))])

    want = gradients()
    mask = head.mask_hidden.grad.clone()
    head.loss_options.update(kept=0.7)
    torch.manual_seed(0)
    found, total = [], torch.zeros_like(mask)
    for _ in range(60):
        found.append(gradients()[0])
        total += head.mask_hidden.grad / 60
    found = torch.stack(found)
    assert found.std() > 0 and abs(found.mean() - want[0]) < 4 * found.std() / 60**0.5
    assert torch.nn.functional.cosine_similarity(total.flatten(), mask.flatten(), dim=0) > 0.95
    assert abs(total.norm() / mask.norm() - 1) < 0.15
    head.eval()
    assert head(text, labels=text).loss == head(text, labels=text).loss


def test_a_draft_ends_behind_the_first_token_that_no_sequence_is_sure_of(pair):
    model, head = pair
    how = dict(max_new_tokens=20, do_sample=False, assistant_model=head, return_dict_in_generate=True)
    for threshold, length in [(1.0, 1), (1e-9, DRAFT)]:
        out = model.generate(
            **left_padded(code_prompts(3)), **how, num_assistant_tokens=DRAFT, assistant_confidence_threshold=threshold
        )
        assert {len(draft) for row in out.speculation.rows_drafts for draft in row[:-DRAFT]} == {length}
