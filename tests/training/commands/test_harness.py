"""`tokenahead lm-eval`: generation tasks are written with drafts; by a stub of lm-eval."""

import sys
from types import ModuleType

import pytest
import torch
from transformers import StoppingCriteria

from tests.backbones import word_tokenizer
from tests.every_model import llama
from tokenahead import cli


def run(*words) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["lm-eval", *map(str, words)])
    return ended.value.code or 0


@pytest.fixture
def stub(monkeypatch):
    """The few names of lm-eval that are used; `HFLM` writes one text."""
    names = ("lm_eval", "lm_eval.__main__", "lm_eval.api", "lm_eval.api.registry", "lm_eval.models")
    found = {name: ModuleType(name) for name in (*names, "lm_eval.models.huggingface")}
    classes = {}

    class HFLM:
        def __init__(self, pretrained, **options):
            self.model = llama()

        def get_model_info(self):
            return {"model_num_parameters": 1}

        def _model_generate(self, context, **options):
            output = self.model.generate(context, **{"max_new_tokens": 12, "return_dict_in_generate": True} | options)
            self.speculation = getattr(output, "speculation", None)
            return classes.get("change", lambda ids, _: ids)(output.sequences, options)

    found["lm_eval.models.huggingface"].HFLM = HFLM
    found["lm_eval.api.registry"].register_model = lambda name: lambda made: classes.setdefault(name, made)
    found["lm_eval.__main__"].cli_evaluate = lambda: classes.get("evaluate", classes.update)(words=sys.argv[1:])
    monkeypatch.setattr(sys, "argv", sys.argv)
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tokenahead.training.commands.harness", raising=False)
    yield classes
    sys.modules.pop("tokenahead.training.commands.harness", None)


@pytest.mark.core
def test_the_class_of_lm_eval_drafts(stub):
    assert run("run", "--tasks", "toy") == 0
    assert stub["words"] == ["run", "--tasks", "toy"]
    ids = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    plain, drafting = (stub["tokenahead"]("x", drafter=name, compare=0) for name in ("plain", "ngram"))
    assert drafting._model_generate(ids).equal(plain._model_generate(ids)) and drafting.speculation.drafts
    with pytest.raises(ValueError, match="drafter='own': a LlamaForCausalLM"):
        stub["tokenahead"]("x")


@pytest.mark.parametrize(
    ("by", "status", "counts"),
    [(0, 0, "equal 9, near-ties 0, different 0"), (32, 0, "equal 6, near-ties 3, different 0"),
     (1, 1, "equal 6, near-ties 0, different 3")],
)  # fmt: skip
def test_texts_are_compared_with_plain_ones(stub, by, status, counts, capsys):
    """A token and the 32nd behind it have the same logits, of which plain decoding takes the first; a batch of three is
    compared as a whole, after eight texts none, and sampled ones never."""
    ids = torch.randint(3, 32, (3, 9), generator=torch.Generator().manual_seed(0))

    def evaluate(words):
        lm = stub["tokenahead"]("x", drafter="ngram")
        with torch.no_grad():
            lm.model.lm_head.weight[32:] = torch.nn.init.normal_(lm.model.lm_head.weight[:32])
        for number in range(4):
            stub["wrong"] = number == 1
            lm._model_generate(ids, attention_mask=torch.ones_like(ids))
            lm._model_generate(ids, attention_mask=torch.ones_like(ids), do_sample=True)
        assert lm.get_model_info() == {"model_num_parameters": 1, "greedy_texts": counts}

    def change(written, options):
        if "assistant_model" in options and stub["wrong"] and not options.get("do_sample"):
            written[:, 12] += by - (by == 1 and 2 * (written[:, 12] % 32 == 31))
        return written

    stub.update(evaluate=evaluate, change=change)
    assert run("run") == status
    assert f"Greedy texts: {counts}{' NOT LOSSLESS' * status}\n" in capsys.readouterr().out


class Until(StoppingCriteria):
    """What lm-eval's own criterion does: it remembers which sequences have ended, reads the last tokens of every one as
    text, and answers once for the whole batch."""

    def __init__(self, words: str, tokenizer, start: int, batch: int) -> None:
        self.words, self.tokenizer, self.start = words, tokenizer, start
        self.done, self.count = [False] * batch, len(tokenizer.encode(words, add_special_tokens=False)) + 2

    def __call__(self, input_ids, scores, **kwargs):
        newest = self.tokenizer.batch_decode(input_ids[:, self.start :][:, -self.count :])
        for index, text in enumerate(newest):
            self.done[index] = self.done[index] or self.words in text
        return False not in self.done


@pytest.mark.by_day("suffix")
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_its_criteria_end_ragged_batches_where_plain_decoding_does(stub, drafter):
    run("run")
    plain, drafting = (stub["tokenahead"]("x", drafter=name, compare=0) for name in ("plain", drafter))
    torch.nn.init.normal_(plain.model.lm_head.weight, generator=torch.Generator().manual_seed(0))
    drafting.model.load_state_dict(plain.model.state_dict())
    words, shorter = word_tokenizer(64), 0
    for seed in range(8):
        ids = torch.randint(3, 64, (4, 9), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        ids[1, :4], mask[1, :4] = 0, 0
        batch = dict(attention_mask=mask, pad_token_id=0, eos_token_id=2 if seed % 2 else None, max_new_tokens=40)
        texts = []
        for model in (plain, drafting):  # each sequence has several such words
            criteria = [Until(until, words, 9, 4) for until in ("3.", "7.w1", "1.")[: 1 + seed % 3]]
            texts.append(model._model_generate(ids, **batch, stopping_criteria=criteria))
        assert texts[0].equal(texts[1])
        shorter += texts[0].shape[1] < 49
    assert shorter


def test_without_lm_eval_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "tokenahead.training.commands.harness", raising=False)
    assert run("run") == 1
    assert "tokenahead[eval]" in capsys.readouterr().err
