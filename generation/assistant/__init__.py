"""Small models that draft: of the same tokenizer or another one, with a cache or with the states of the backbone."""
