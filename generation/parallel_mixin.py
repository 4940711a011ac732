"""`generate` for a model with parallel token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedModel

from .mixins import MTPGenerationMixin
from .parallel_drafter import ParallelDrafter

if TYPE_CHECKING:
    from .drafters.parallel_assistant import ParallelAssistant


class ParallelGenerationMixin(ParallelDrafter, MTPGenerationMixin):
    """`generate` that drafts a block of tokens from uniforms, in the forward that verifies the last block.

    Beside the options of `MTPGenerationMixin`:

    - `verification`: `"coupled"` (the same uniforms for draft and target; the default where slots predict tokens,
      `variant="one_hot"`), `"block"` (the default where they predict distributions) or `"token"`;
    - `uniforms`: [B, max_new_tokens] in [0, 1), `uniforms[:, 0]` for the first new token: the tokens are those of
      sequential inverse-CDF decoding, with or without `use_mtp`;
    - `seed`: an int, of which row i reads stream i, or one int per row. It repeats a run under every rule, and a row's
      text depends on its seed and its prompt alone: not on the rows beside it, not on `max_new_tokens`. With
      `verification="coupled"` it does not depend on `use_mtp` either;
    - `slot_budget`: auxiliary slots per forward, split over the possible acceptance counts (3 N by default); or
      `"quadratic"`: N behind every draft, so that each count leaves a whole new draft; or `"linear"`: N behind the last
      draft alone, so that a plain step follows a rejection (both of masked prediction, arXiv 2507.11851);
    - `temperature`, `top_k`, `top_p`: where none is set, those that the drafts were learned for
      (`config.sampling`), not transformers' own;
    - `best_of`: M vectors of uniforms to draft from in every cycle, of which the most central is kept: more drafts are
      accepted, for M^2 times the slots. A run with `seed` can be repeated, but it is not that of `use_mtp=False`.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, with the options above.

        Raises:
            RuntimeError: transformers' own loop calls it for an assistant: this model was not attached.
        """
        if getattr(kwargs.get("generation_config"), "is_assistant", None):
            raise RuntimeError(
                f"this {type(self).__name__} is no assistant_model of that model yet: call attach(model) first, on it, "
                "and its slots will draft there"
            )
        return super().generate(*args, **kwargs)

    def attach(self, backbone: PreTrainedModel) -> ParallelAssistant:
        """Lets this model draft for a larger one, whose `generate` then takes it as `assistant_model`.

        Args:
            backbone: Any causal language model of transformers with the same vocabulary; of a PeftModel, the model
                within.

        Returns:
            The drafter, which may be passed as well, and which `detach()` takes off again.

        Raises:
            ValueError: Another vocabulary, or an encoder-decoder.
        """
        from .drafters.parallel_assistant import ParallelAssistant  # it imports the models, which import this

        return ParallelAssistant(self).attach(backbone)

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> GenerationConfig:
        """Checks the length of the whole text at the door.

        Raises:
            ValueError: The text would go beyond the backbone's table of learned positions.
        """
        config = super()._prepare_generated_length(*args, **kwargs)
        limit = self.config.learned_positions
        if limit is not None and config.max_length > limit + 1:  # the last token is never fed
            raise ValueError(
                f"max_length={config.max_length} (prompt and new tokens) is beyond the {limit} learned positions of "
                f"{self.config.backbone_config.model_type}; ask for {config.max_length - limit - 1} fewer new tokens"
            )
        return config
