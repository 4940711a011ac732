"""What drafts that know a call's constraints bring: tokens per call and speed, with and without.

    python benchmarks/constraints.py --model HuggingFaceTB/SmolLM2-135M-Instruct \
        --drafters ngrams model_cards/smollm2/eagle3

The first table says one target distribution in three ways, on the same seeds: as `suppress_tokens` (a share of the
vocabulary), as `prefix_allowed_tokens_fn`, and as the same function hidden from the drafts. The second keeps the text
to JSON schemas, as `GrammarConstraint` and as the same hidden. Tokens per call are means over all verifications.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import accepted_of, show
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tokenahead import GrammarConstraint, NgramDrafter
from tokenahead.generation.tensors.wrapped_models import untyped

TEXT, NUMBER, FLAG = {"type": "string", "maxLength": 40}, {"type": "integer"}, {"type": "boolean"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "Describe a person with a name, an age and a city.": {"name": TEXT, "age": NUMBER, "city": TEXT},
    "Describe a book with a title, an author and a year.": {"title": TEXT, "author": TEXT, "year": NUMBER},
    "Give a recipe: a name, its ingredients and whether it is vegan.": {
        "name": TEXT, "ingredients": {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 5}, "vegan": FLAG,
    },
    "Rate a film: a title, a score from 1 to 5 and a comment.": {
        "title": TEXT, "score": {"type": "integer", "minimum": 1, "maximum": 5}, "comment": TEXT,
    },
    "Describe a country: its capital, its continent and its languages.": {
        "capital": TEXT, "continent": {"enum": ["Africa", "Asia", "Europe", "North America", "South America"]},
        "languages": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 4},
    },
    "Plan a meeting: a topic, a date and the number of people.": {
        "topic": TEXT, "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}, "people": NUMBER,
    },
}  # fmt: skip
"""Questions, and the properties of their answers."""


class Hidden(LogitsProcessor):
    """Another processor, hidden from the drafts."""

    def __init__(self, processor: Callable[..., Any]) -> None:
        self.processor = processor

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Do what the processor does."""
        return self.processor(input_ids, scores)


class HiddenGrammar(LogitsProcessor):
    """A grammar, hidden from the drafts; one sequence, whose prompt ends at a length."""

    def __init__(self, grammar: GrammarConstraint, prompt_length: int) -> None:
        self.grammar, self.start = grammar, prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Exclude what the grammar does."""
        mask = self.grammar.allowed(tuple(input_ids[0, self.start :].tolist()))
        return scores.masked_fill(~mask[: scores.shape[-1]].to(scores.device), -torch.inf)


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object without other properties, written without free white space."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }  # fmt: skip


def run(model: PreTrainedModel, prompts: list[dict[str, Any]], ways: list[dict[str, Any]], **options: Any) -> str:
    """Return tokens per call and tokens per second of calls, each with its prompt and its options."""
    verified, calls, tokens, seconds = 0, 0, 0, 0.0
    for number, (prompt, way) in enumerate(zip(prompts, ways)):
        torch.manual_seed(number)
        begun = time.perf_counter()
        out = untyped(model).generate(**prompt, **way, **options, return_dict_in_generate=True)
        seconds += time.perf_counter() - begun
        tokens += out.sequences.shape[1] - prompt["input_ids"].shape[1]
        if "assistant_model" in options:
            accepted = accepted_of(out)
            verified, calls = verified + sum(accepted) + len(accepted), calls + len(accepted)
    return f"{verified / calls if calls else 1:.2f} ({tokens / seconds:.0f}/s)"


def chat(tokenizer: PreTrainedTokenizerBase, question: str) -> dict[str, Any]:
    """Return the inputs of a question."""
    messages = [{"role": "user", "content": question}]
    inputs: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return dict(inputs)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafters", nargs="+", default=["ngrams"], help="'ngrams', or directories")
    parser.add_argument("--share", type=float, default=0.33, help="of the vocabulary that is excluded")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(SCHEMAS))
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    size = model.config.get_text_config().vocab_size
    ends = torch.as_tensor(model.generation_config.eos_token_id).flatten().tolist()
    chosen = torch.rand(size, generator=torch.Generator().manual_seed(0)) < arguments.share
    chosen[ends] = False
    banned, allowed = chosen.nonzero()[:, 0].tolist(), (~chosen).nonzero()[:, 0].tolist()
    common: dict[str, Any] = {"max_new_tokens": arguments.new_tokens, "do_sample": arguments.temperature > 0}
    if arguments.temperature > 0:
        common |= {"temperature": arguments.temperature, "top_k": 0, "top_p": 1.0}
    questions = list(SCHEMAS.items())[: arguments.prompts]
    plain = [chat(tokenizer, question) for question, _ in questions]
    asked = [chat(tokenizer, f"{question} Answer with a JSON object only.") for question, _ in questions]
    grammars = [GrammarConstraint(tokenizer, json_schema=object_of(properties)) for _, properties in questions]
    function = PrefixConstrainedLogitsProcessor(lambda row, ids: allowed, 1)
    ways: dict[str, list[dict[str, Any]]] = {
        "suppress_tokens": [{"suppress_tokens": banned}] * len(plain),
        "prefix function": [{"prefix_allowed_tokens_fn": lambda row, ids: allowed}] * len(plain),
        "the same, hidden": [{"logits_processor": [Hidden(function)]}] * len(plain),
    }
    schemas: dict[str, list[dict[str, Any]]] = {
        "JSON schema": [{"logits_processor": [grammar]} for grammar in grammars],
        "the same, hidden": [
            {"logits_processor": [HiddenGrammar(grammar, prompt["input_ids"].shape[1])]}
            for grammar, prompt in zip(grammars, asked)
        ],
    }
    for title, prompts, columns in (("one distribution", plain, ways), ("JSON schemas", asked, schemas)):
        rows = []
        for name in (None, *arguments.drafters):
            own = {}
            if name is not None:
                own["assistant_model"] = NgramDrafter() if name == "ngrams" else AutoModel.from_pretrained(name)
                own["assistant_model"].attach(model)
            rows.append([name or "none", *(run(model, prompts, way, **common, **own) for way in columns.values())])
            for drafter in own.values():
                drafter.detach()
        show(("drafter", *columns), rows, f"{title}: tokens per call (tokens per second)")


if __name__ == "__main__":
    main()
