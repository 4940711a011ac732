"""Columns of training rows: read, harmless, or refused by name, wherever rows are read."""

import json
from functools import cache
from itertools import chain

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening, TrainingArguments
from trl import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as CollatorOfTRL

from tests.every_model import llama
from tokenahead import BlockDrafter, EagleHead, EvaByteTokenizer, MTPHeads
from tokenahead.training import MTPSFTTrainer, MTPTrainer, cache_features
from tokenahead.training.columns import template_options
from tokenahead.training.evaluation.prompts import PromptEncoder, read_prompts

IDS = [torch.randint(70, 120, (10,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
SCORED = [0] * 6 + [1] * 4


def masked(ids, scored):
    return [token if is_scored else -100 for token, is_scored in zip(ids, scored)]


LABELLED = [{"input_ids": ids, "labels": masked(ids, SCORED)} for ids in IDS]
PADDED = [1] * 7 + [0] * 3
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
UNKNOWN = {
    "response_mask": [SCORED] * 4, "assistant_mask": [SCORED] * 4, "token_type_ids": [SCORED] * 4, "weights": [1.0] * 4,
    "images": ["a"] * 4, "system": ["Be brief."] * 4, "label": [1] * 4,
}  # fmt: skip
KINDS = {
    "rows": list,
    "a dataset": Dataset.from_list,
    "a stream": lambda rows: IterableDataset.from_generator(lambda: iter(rows)),
}


@cache
def head():
    return EagleHead.from_backbone(llama(vocab_size=320))


def scored(rows, folder, trainer=MTPTrainer, config=TrainingArguments, eval_rows=None, **options):
    """Return the tokens that a trainer learns of rows, and those that it evaluates."""
    names = {"remove_unused_columns", "completion_only_loss", "packing", "max_length"} & options.keys()
    args = config(
        str(folder), max_steps=1, report_to="none", per_device_train_batch_size=4, use_cpu=True, bf16=False,
        **{name: options.pop(name) for name in names},
    )  # fmt: skip
    if trainer is MTPSFTTrainer:
        options["processing_class"] = EvaByteTokenizer()
    trainer, found = trainer(head(), args, train_dataset=rows, eval_dataset=eval_rows, **options), []
    for loader in [trainer.get_train_dataloader(), *([] if eval_rows is None else [trainer.get_eval_dataloader()])]:
        tokens = []
        for batch in map(trainer._prepare_inputs, loader):
            positions = batch.get("position_ids", torch.arange(batch["labels"].shape[1])[None])
            tokens += batch["labels"][(batch["labels"] != -100) & (positions != 0)].tolist()
        found.append(sorted(tokens))
    return found


TOKENS = sorted(chain(*(ids[6:] for ids in IDS)))
REAL = sorted(chain(*(ids[1:7] for ids in IDS)))


def with_column(name, values, rows=IDS):
    return [{"input_ids": ids, name: values} for ids in rows]


@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_labels_in_training_and_evaluation(kind, removes, tmp_path):
    make = KINDS[kind]
    for rows in (LABELLED, *(with_column(name, SCORED) for name in MASKS)):
        assert scored(make(rows), tmp_path, eval_rows=make(rows), remove_unused_columns=removes) == [TOKENS] * 2


def test_each_row_is_read_by_the_mask_that_it_has(tmp_path):
    rows = [*with_column("loss_mask", SCORED, IDS[:2]), *LABELLED[2:]]
    filled = [{"loss_mask": None, "labels": None} | row for row in rows]  # as files of columns are
    for data in (rows, filled, Dataset.from_list(filled)):
        assert scored(data, tmp_path) == [TOKENS]
    without = {"loss_mask": None, "labels": None, "input_ids": IDS[0]}  # learned as a whole, or not at all?
    for data in ([without, *filled[1:]], Dataset.from_list([*filled[1:], without]), [{"input_ids": IDS[0]}, *rows[1:]]):
        with pytest.raises(ValueError, match="labels"):
            scored(data, tmp_path)


def test_masks_of_packed_rows_are_labels(tmp_path):
    rows = [row | {"position_ids": [*range(8), *range(2)]} for row in with_column("loss_mask", SCORED)]
    want = sorted(chain(*(ids[6:8] + ids[9:] for ids in IDS)))
    assert scored(rows, tmp_path) == scored(Dataset.from_list(rows), tmp_path) == [want]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_learned(kind, tmp_path):
    rows = [{"input_ids": ids, "labels": ids, "attention_mask": PADDED} for ids in IDS]
    for options in ({}, *({"data_collator": each} for each in (DataCollatorWithFlattening(), CollatorOfTRL(0)))):
        assert scored(KINDS[kind](rows), tmp_path, **options) == [REAL]  # these collators know no mask


@pytest.mark.by_day("rows-response_mask", "a dataset-images", "a stream-system")
@pytest.mark.parametrize("column", UNKNOWN)
@pytest.mark.parametrize("kind", KINDS)
def test_other_columns_are_refused_by_name_or_ignored_on_request(kind, column, tmp_path):
    rows = KINDS[kind]([row | {column: value} for row, value in zip(LABELLED, UNKNOWN[column])])
    for options in ({}, {"remove_unused_columns": False}):
        with pytest.raises(ValueError, match=column):
            scored(rows, tmp_path, **options)
        with pytest.raises(ValueError, match=column):
            scored(LABELLED, tmp_path, eval_rows=rows, **options)
        assert scored(rows, tmp_path, ignore_columns=[column], **options) == [TOKENS]


def test_columns_that_say_nothing_of_what_is_learned_pass(tmp_path):
    besides = {"id": 3, "source": "web", "lengths": 10, "text": "abc", "messages": [{"role": "user", "content": "a"}]}
    rows = [row | besides for row in LABELLED]
    assert scored(rows, tmp_path) == scored(Dataset.from_list(rows), tmp_path) == [TOKENS]


def test_masks_that_differ_and_masks_of_other_lengths_are_refused(tmp_path):
    rows = [row | {"loss_mask": [1] * 10} for row in LABELLED]
    with pytest.raises(ValueError, match="labels and loss_mask"):
        scored(rows, tmp_path)
    assert scored(rows, tmp_path, ignore_columns=["loss_mask"]) == [TOKENS]
    for name in ("loss_mask", "labels"):
        with pytest.raises(ValueError, match=f"10 input_ids and 9 {name}"):
            scored(with_column(name, SCORED[1:]), tmp_path)


def test_a_collator_that_labels_all_tokens_takes_no_masks(tmp_path):
    collator = DataCollatorForLanguageModeling(EvaByteTokenizer(), mlm=False)
    for name in ("labels", "loss_mask"):
        with pytest.raises(ValueError, match=name):
            scored(with_column(name, SCORED), tmp_path, data_collator=collator)


def test_a_collator_of_others_makes_labels_of_its_masks(tmp_path):
    def stacked(rows):
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    def labelled(rows):
        batch = stacked(rows)
        return {"input_ids": batch["input_ids"], "labels": batch["input_ids"].masked_fill(batch["keep"] == 0, -100)}

    options = dict(data_collator=labelled, remove_unused_columns=False)
    assert scored(with_column("keep", SCORED), tmp_path, **options) == [TOKENS]
    rows = [row | {"loss_mask": SCORED} for row in LABELLED]
    with pytest.raises(ValueError, match="loss_mask"):
        scored(rows, tmp_path, data_collator=stacked, remove_unused_columns=False)


SFT = dict(trainer=MTPSFTTrainer, config=SFTConfig)


@pytest.mark.by_day("True-a dataset")
@pytest.mark.parametrize("kind", ["a dataset", "a stream"])
@pytest.mark.parametrize("packing", [False, True])
def test_trainers_of_trl_read_masks_and_padding(kind, packing, tmp_path):
    make, options = KINDS[kind], SFT | dict(packing=packing, max_length=16)
    for name in MASKS:
        rows = with_column(name, SCORED)
        assert scored(make(rows), tmp_path, eval_rows=make(rows), **options) == [TOKENS] * 2
    rows = [row | {"attention_mask": PADDED, "labels": row["input_ids"]} for row in LABELLED]
    assert scored(make(rows), tmp_path, **options) == [REAL]


@pytest.mark.by_day("images", "weights")
@pytest.mark.parametrize("column", [*UNKNOWN, "position_ids", "seq_lengths"])
def test_trainers_of_trl_refuse_what_they_do_not_read(column, tmp_path):
    values = UNKNOWN.get(column, [[*range(10)]] * 4)
    rows = Dataset.from_list([row | {column: value} for row, value in zip(LABELLED, values)])
    good = Dataset.from_list(LABELLED)
    for data in ({"rows": rows}, {"rows": good, "eval_rows": rows}):
        with pytest.raises(ValueError, match=column.removesuffix("s")):  # "image", of TRL's own
            scored(**data, folder=tmp_path, **SFT)
    if column == "weights":
        assert scored(rows, tmp_path, ignore_columns=[column], **SFT) == [TOKENS]


def test_stored_states_have_the_labels_of_masks(tmp_path):
    rows = [
        {"input_ids": ids, "loss_mask": SCORED, "attention_mask": PADDED, "position_ids": [*range(10)]} for ids in IDS
    ]
    stored = cache_features(head(), rows, tmp_path / "a")
    for row, ids in zip(stored, IDS):
        assert row["labels"].tolist() == masked(ids, SCORED)[:7] and row["input_ids"].tolist() == ids[:7]
    odd = [row | {"response_mask": SCORED} for row in LABELLED]
    with pytest.raises(ValueError, match="response_mask"):
        cache_features(head(), odd, tmp_path / "b")
    assert cache_features(head(), odd, tmp_path / "b", ignore_columns=["response_mask"])[0]["labels"][:6].max() == -100


def test_a_block_drafter_reads_one_source_of_what_is_scored():
    backbone = llama(vocab_size=320).double()
    drafter = BlockDrafter.from_backbone(backbone, layers=1, block_size=3).eval()
    ids = torch.tensor(IDS[:2])
    labels, mask = torch.tensor([masked(row, SCORED) for row in IDS[:2]]), torch.tensor([SCORED] * 2)
    want = drafter(ids, labels=labels).loss
    assert torch.equal(drafter(ids, loss_mask=mask).loss, want)
    assert torch.equal(drafter(ids, loss_mask=mask, labels=labels).loss, want)
    with pytest.raises(ValueError, match="labels and loss_mask"):
        drafter(ids, labels=ids, loss_mask=mask)


def test_options_of_templates_are_those_of_the_row():
    tool = {"type": "function", "function": {"name": "add"}}
    assert template_options({"tools": None, "chat_template_kwargs": None, "messages": []}) == {}
    row = {"tools": json.dumps([tool]), "chat_template_kwargs": {"enable_thinking": False, "style": None}}
    assert template_options(row) == {"tools": [tool], "enable_thinking": False}
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        template_options({"chat_template_kwargs": [1]})


TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if style is defined %}<{{ style }}>{% endif %}{% if enable_thinking is defined %}!{% endif %}"
)


def test_chats_are_learned_with_their_own_options_alone(tmp_path):
    tokenizer = EvaByteTokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    options = [{"style": "brief"}, {"enable_thinking": False}, None]
    rows = [{"messages": chat, "chat_template_kwargs": each} for each in options]
    for make in (KINDS["a dataset"], KINDS["a stream"]):
        args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1)
        heads = MTPHeads.from_backbone(llama(vocab_size=320))
        trainer = MTPSFTTrainer(heads, args, train_dataset=make(rows), processing_class=tokenizer)
        texts = [tokenizer.decode(row["input_ids"]) for row in trainer.train_dataset]
        heads.detach()
        assert texts == ["1+12<brief>", "1+12!", "1+12"]
    odd = Dataset.from_list([{"messages": chat, "system": "Be brief."}])
    with pytest.raises(ValueError, match="system"):
        heads = MTPHeads.from_backbone(llama(vocab_size=320))
        MTPSFTTrainer(heads, args, train_dataset=odd, processing_class=tokenizer)


def test_prompts_have_the_options_of_their_row(tmp_path):
    tokenizer, file = EvaByteTokenizer(), tmp_path / "prompts.jsonl"
    tokenizer.chat_template = TEMPLATE
    tool = {"type": "function", "function": {"name": "add"}}
    rows = [
        {"messages": [{"role": "user", "content": "1+1"}], "tools": [tool]},
        {"prompt": "a", "chat_template_kwargs": {"style": "x"}, "completion": "b", "id": 7},
        {"turns": ["q"]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    prompts, _ = read_prompts(file)
    encoder, device = PromptEncoder(tokenizer), torch.device("cpu")
    texts = [tokenizer.decode(encoder.batch([each], [[]], device)["input_ids"][0]) for each in prompts]
    assert texts == ["[add]1+1", "a<x>", "q"]
    with pytest.raises(ValueError, match="tools"):
        PromptEncoder(tokenizer, chats=False).check(prompts)
    file.write_text(json.dumps({"prompt": "a", "system": "Be brief."}))
    with pytest.raises(ValueError, match="system"):
        read_prompts(file)
    assert read_prompts(file, ignore_columns=["system"])[0][0].turns == ("a",)
