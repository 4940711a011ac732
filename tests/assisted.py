"""transformers' own assisted loop (batch 1) with the chains of one of our drafters, through `CandidateAdapter`."""

from tokenahead.extending import candidate_generator


def assisted_generate(model, prompt, drafter, **options):
    """`generate` of the model's class, which asks the model for its candidates."""

    def candidates(generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, *args, **kwargs):
        return candidate_generator(drafter, model, generation_config, logits_processor, model_kwargs, input_ids)

    model._get_candidate_generator = candidates
    try:
        return type(model).generate(model, prompt, assistant_model=drafter, **options)
    finally:
        del model._get_candidate_generator
