"""Star graphs: what a row says, and that registers there are those of `MuToRTrainer`."""

import torch
from transformers import TrainingArguments

from tests.benchmark_modules import star_graph
from tests.ptp_models import backbone
from tokenahead.training import MuToROptions, MuToRTrainer

STARS = star_graph.Stars(arms=3, length=4, names=10)


def rows(count=16):
    return STARS.draw(count, torch.Generator().manual_seed(0))


def test_a_row_leads_from_the_centre_to_the_end_it_names():
    for row in rows().tolist():
        edges, (centre, end, asks), path = row[: STARS.prompt - 3], row[STARS.prompt - 3 : STARS.prompt], row[-3:]
        after: dict[int, list[int]] = {}
        for parent, child in zip(edges[::2], edges[1::2]):
            after.setdefault(parent, []).append(child)
        assert asks == STARS.names and len({*edges}) == 10 and len(after[centre]) == 3
        assert path[-1] == end and all(child in after[parent] for parent, child in zip([centre, *path], path))
    labels = STARS.labels(rows())
    assert (labels[:, : STARS.prompt] == -100).all() and torch.equal(labels[:, STARS.prompt :], rows()[:, -3:])


def test_registers_learn_as_in_the_trainer(tmp_path):
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    base, options = backbone(), MuToROptions(max_offset=3, weight=star_graph.REGISTERS)
    trainer = MuToRTrainer(base, arguments, options=options, train_dataset=[{"input_ids": row} for row in rows()])
    batch = {"input_ids": rows(), "labels": STARS.labels(rows())}
    task, model = trainer._task(trainer.model, batch, True), trainer.model.eval()
    counts = trainer._counts(task)
    wanted, _ = trainer._learn(model, task, counts, counts)
    torch.testing.assert_close(star_graph.register_loss(model, STARS, rows(), task.offsets), wanted)
