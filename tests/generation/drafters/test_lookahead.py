"""Lookahead against a plain dictionary of n-grams and lists of guesses, and what a drafter does with them in calls."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig

from tests.backbones import backbone, prompts
from tests.models import left_padded
from tokenahead import LookaheadDrafter
from tokenahead.generation.lookups import lookahead

OPTIONS = dict(max_new_tokens=32, do_sample=False, pad_token_id=0)
WINDOW, SIZE, CANDIDATES = 4, 4, 3


@pytest.fixture
def cycles(monkeypatch):
    """Every block that was drafted, and everything that was verified, by turns."""
    seen = []

    class Watched(lookahead.LookaheadSession):
        def begin(self, outputs, view):
            super().begin(outputs, view)
            seen.append(self.guesses.tolist())

        def propose(self, tokens, length):
            tree = super().propose(tokens, length)
            seen.append((tokens.last().tolist(), tree.tokens.tolist(), tree.parents.tolist()))
            return tree

        def advance(self, outputs, result):
            seen.append((outputs.block[1].argmax(-1).tolist(), self.view.new_tokens.counts))
            super().advance(outputs, result)

    monkeypatch.setattr(lookahead, "LookaheadSession", Watched)
    return seen


def path_to(node, tokens, parents):
    """The tokens of the path from b to a node."""
    path = []
    while node >= 0:
        path, node = [tokens[node], *path], parents[node]
    return path


def noted(known, gram):
    """The n-grams of a first token with another one in front."""
    return [gram, *(each for each in known if each != gram)][:CANDIDATES]


def test_blocks_are_n_grams_and_guesses_that_the_backbone_corrects(cycles):
    model = backbone(vocabulary=40).double()
    drafter = LookaheadDrafter(WINDOW, SIZE, CANDIDATES).attach(model)
    levels, batch = SIZE - 1, left_padded(prompts(5, vocabulary=40))
    known = {token: [[rank] * levels for rank in range(CANDIDATES)] for token in range(40)}
    plain = model.generate(**batch, **OPTIONS)
    for _ in range(2):  # the second call drafts from what the first one left
        cycles.clear()
        out = model.generate(**batch, **OPTIONS, assistant_model=drafter, return_dict_in_generate=True)
        assert out.sequences.equal(plain) and any(map(any, out.speculation.rows_accepted))
        guesses, whole = cycles[0], 0
        for (last, drafts, parents), (answers, counts) in zip(cycles[1::2], cycles[2::2]):
            if len(drafts[0]) < levels * (CANDIDATES + WINDOW):  # near the end, of candidates alone
                continue
            whole, fresh = whole + 1, {}
            for row, (token, tokens, above) in enumerate(zip(last, drafts, parents)):
                paths = [path_to(node, tokens, above) for node in range(len(tokens))]
                ends = [paths[(levels - 1) * CANDIDATES + rank] for rank in range(CANDIDATES)]
                assert ends == known[token]
                first, begun = guesses[row][0], levels * CANDIDATES
                columns = []
                for place in range(WINDOW):
                    behind = [guesses[row][level][place] for level in range(1, levels)]
                    node = begun + WINDOW + (place + 1) * (levels - 1) - 1
                    assert paths[begun + place] == first[: place + 1] and paths[node] == first[: place + 1] + behind
                    columns.append([*behind, answers[row][node + 1]])
                    if counts[row]:
                        fresh[first[place]] = noted(known[first[place]], columns[-1])
                moved = (max(counts[row] - 1, 0) + place for place in range(WINDOW))
                guesses[row] = [list(level) for level in zip(*(columns[place % WINDOW] for place in moved))]
            known |= fresh  # of one first token, the last n-gram of a cycle counts
        assert whole > 3
    assert drafter.table[:-1].tolist() == list(known.values())


def test_the_guesses_alone_are_drafted_where_the_backbone_takes_no_trees():
    torch.manual_seed(1)
    sizes = dict(vocab_size=40, hidden_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(BloomConfig(n_layer=2, n_head=4, initializer_range=0.3, **sizes)).eval()
    batch, drafter = left_padded(prompts(3, vocabulary=40)), LookaheadDrafter(window=5).attach(model)
    out = model.generate(**batch, **OPTIONS, assistant_model=drafter, use_mtp=True, return_dict_in_generate=True)
    assert out.sequences.equal(model.generate(**batch, **OPTIONS)) and any(map(any, out.speculation.rows_accepted))
    assert drafter.table.equal(drafter.first_entry(40).expand_as(drafter.table))


def test_a_table_lasts_until_it_is_forgotten():
    model, batch = backbone(vocabulary=40), left_padded(prompts(2, vocabulary=40))
    drafter = LookaheadDrafter(WINDOW, SIZE, CANDIDATES).attach(model)
    with torch.inference_mode():  # other calls need not be in it
        model.generate(**batch, **OPTIONS, assistant_model=drafter)
    known, restore, address = drafter.table.clone(), drafter.restore_point(), drafter.table.data_ptr()
    model.generate(**batch, **OPTIONS, assistant_model=drafter)
    assert not drafter.table.equal(known)
    restore()
    assert drafter.table.equal(known)
    drafter.forget()
    assert drafter.table.equal(drafter.first_entry(40).expand_as(drafter.table)) and drafter.table.data_ptr() == address
