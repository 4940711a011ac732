"""Assistants of transformers: drafts are transformers' own, for batches too, and cost nobody their text."""

from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.generation import candidate_generator

from tests.backbones import CONFIGS, check_greedy, code, code_prompts, coder, learn
from tests.models import left_padded
from tests.no_sync import NoSync
from tokenahead import AssistantDrafter, BlockDrafter
from tokenahead.generation.backbone.backbones import target_of
from tokenahead.generation.call.options import CallOptions, DraftOptions
from tokenahead.generation.call.sequences import Sequences

BLOCK, LAYERS, WINDOW = 5, [-1, 0], 9
"""Tokens of a block, b among them; layers whose outputs are read (-1: embeddings); how far back windows reach."""
NAMES = ["llama", "mistral", "glimmer"]
_MUSE = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    sliding_window=6, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.15, output_multiplier=1.0,
    max_position_embeddings=256,
)  # fmt: skip
_EYE = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pos_emb_height=4, pos_emb_width=4
)


def muse() -> PreTrainedModel:
    """A random Muse Glimmer with an eye that is not used."""
    library = pytest.importorskip("transformers.models.muse_glimmer")
    text = _MUSE | {"vocab_size": 48}
    parts = dict(text_config=text, vision_config=_EYE, out_hidden_size=64, projector_hidden_size=16)
    torch.manual_seed(1)
    config = library.MuseGlimmerConfig(**parts, image_token_id=46, video_token_id=45)
    model = library.MuseGlimmerForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def assistant(vocabulary: int = 48, **changes) -> PreTrainedModel:
    """A random assistant for backbones of width 32, with a layer of either kind."""
    kind = pytest.importorskip("transformers.models.muse_glimmer_assistant").MuseGlimmerAssistantConfig
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], block_size=BLOCK,
        mask_token_id=vocabulary - 1, target_layer_ids=LAYERS, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    return transformers.MuseGlimmerAssistantModel(kind(**sizes | changes)).eval()


def drafter_of(model: PreTrainedModel) -> BlockDrafter:
    """The block drafter of an assistant's directory."""
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return BlockDrafter.from_pretrained(directory, dtype=torch.float32).eval()


def fill(model: PreTrainedModel, source: PreTrainedModel, text: torch.Tensor, place: int) -> torch.Tensor:
    """Logits [B, block - 1, V] of drafts after `text[:, : place + 1]`, by the assistant's own forward, all at once."""
    with torch.no_grad():
        states = source(text[:, :place], output_hidden_states=True).hidden_states
        embedding, size = source.get_input_embeddings(), model.config.block_size
        ids = torch.cat([text[:, place, None], text.new_full((len(text), size - 1), model.config.mask_token_id)], 1)
        block = torch.nn.functional.embedding(ids, embedding.weight)
    columns = torch.arange(place + size)
    near = (columns[place:, None] - columns).abs() <= model.config.sliding_window
    filled = model(
        noise_embeds=block, context_hidden_states=torch.cat([states[layer + 1] for layer in LAYERS], -1),
        position_ids=columns[None], attention_mask={"full_attention": None, "sliding_attention": near[None, None]},
    )  # fmt: skip
    return source.get_output_embeddings()(filled.last_hidden_state[:, 1:])


def learn_to_fill(model: PreTrainedModel, source: PreTrainedModel, text: torch.Tensor) -> PreTrainedModel:
    """Trains an assistant on texts [N, L]."""
    generator, optimizer = torch.Generator().manual_seed(4), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        place = int(torch.randint(1, text.shape[1] - BLOCK, (), generator=generator))
        logits, goal = fill(model, source, text, place), text[:, place + 1 : place + BLOCK]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), goal.flatten()).backward()
        optimizer.step()
    return model.eval()


@cache
def trained_pair(name: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A backbone that writes code, and an assistant that is often right about it."""
    source = coder(name) if name in CONFIGS else learn(muse(), code(), 60)
    return source, learn_to_fill(assistant(), source, code()[: 24 * 60].view(60, 24))


@pytest.fixture(params=NAMES)
def pair(request):
    model, small = trained_pair(request.param)
    drafter = drafter_of(small).attach(model)
    yield model, drafter, small
    drafter.detach()


@pytest.mark.by_day("llama")
def test_greedy_alone_and_in_ragged_batches(pair):
    model, drafter, _ = pair
    assert check_greedy(model, drafter, code_prompts(8), new=41) == set(range(BLOCK))


@pytest.mark.by_day("glimmer")
def test_drafts_are_those_of_transformers(pair, monkeypatch):
    """Cycle for cycle, as long as there is room for a whole block; texts are longer than windows."""
    model, drafter, small = pair
    theirs, made, seen = [], candidate_generator.DFlashTokenCandidateGenerator, set()
    get = made.get_candidates

    def recorded(self, input_ids, *args, **kwargs):
        ids, logits = get(self, input_ids, *args, **kwargs)
        theirs.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(made, "get_candidates", recorded)
    for prompt in code_prompts(4):
        inputs = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt)[None]}
        options = dict(max_new_tokens=40, do_sample=False)
        out = model.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True, **options)
        theirs.clear()
        own = type(model).generate(model, **inputs, assistant_model=small, speculation_type="dflash", **options)
        assert torch.equal(out.sequences, own)
        drafts = out.speculation.drafts
        whole = [draft for draft in drafts if len(draft) == BLOCK - 1]
        assert whole == theirs[1 : 1 + len(whole)] and len(whole) > 5
        seen |= set(out.speculation.accepted[: len(whole)])
    assert seen == set(range(BLOCK))


def first_draft(model, small, batch, do_sample):
    """The draft behind a batch, as the loop asks for it, without a wait for the device."""
    inputs, cache = left_padded(batch), DynamicCache(config=model.config)
    places = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    session_layers = [layer + 1 for layer in small.config.target_layer_ids]
    with torch.no_grad():
        outputs = model(**inputs, position_ids=places, past_key_values=cache, output_hidden_states=session_layers)
    prompt = inputs["input_ids"]
    target = target_of(model, cache, prompt[:, 0], inputs["attention_mask"])
    config, _ = model._prepare_generation_config(None, do_sample=do_sample, max_length=40)
    made = DraftOptions.of_call(
        CallOptions(num_assistant_tokens=BLOCK - 1, speculates=True), model, config, LogitsProcessorList(), prompt
    )
    session = drafter_of(small).attach(model).start(made)
    session.begin(outputs, target)
    tokens = Sequences(torch.cat([prompt, outputs.logits[:, -1:].argmax(-1)], dim=1))
    with torch.no_grad(), NoSync():
        return tokens, session.propose(tokens, BLOCK - 1)


def test_distributions_are_those_of_its_own_forward():
    """For rows of a ragged batch as for each row alone."""
    model, small = trained_pair()
    batch = code_prompts(5)
    tokens, tree = first_draft(model, small, batch, do_sample=True)
    assert tree.probs.shape == (5, BLOCK - 1, 48) and len(batch[-1]) > WINDOW
    for row, prompt in enumerate(batch):
        text = torch.cat([prompt, tokens.last()[row, None]])[None]
        expected = fill(small, model, text, len(prompt)).softmax(-1)
        torch.testing.assert_close(tree.probs[row], expected[0], atol=1e-5, rtol=1e-4)


def test_drafters_with_a_cache_of_their_own_refuse_it(tmp_path):
    assistant().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BlockDrafter.from_pretrained"):
        AssistantDrafter(assistant())
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):  # transformers says so
        AssistantDrafter.from_pretrained(tmp_path)
