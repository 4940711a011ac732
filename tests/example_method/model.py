"""A GRU over drafted tokens that starts from the backbone's last hidden state: its network, and how it learns."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tests.example_method.configuration import GRUDrafterConfig
from tests.example_method.session import GRUSession
from tokenahead.extending import AttachableDrafter, DraftOptions, DraftSession
from tokenahead.modeling.heads.losses import IGNORE, depth_targets


class GRUDrafter(AttachableDrafter, PreTrainedModel):
    """Drafts token after token: state h = GRU(embedding of the token, h), logits = the backbone's unembedding of h."""

    config_class = GRUDrafterConfig
    loss_unit = "head"  # names of the log: loss_head_1, ...

    def __init__(self, config: GRUDrafterConfig) -> None:
        super().__init__(config)
        self.cell = nn.GRUCell(config.hidden_size, config.hidden_size)
        self.window = config.window
        self.post_init()

    @classmethod
    def from_backbone(cls, backbone: PreTrainedModel, window: int = 4) -> "GRUDrafter":
        """Return a new drafter, attached to the backbone."""
        sizes = backbone.config.get_text_config()
        config = GRUDrafterConfig(window, sizes.hidden_size, sizes.vocab_size)
        return cls(config).attach(backbone)

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuse a backbone of other sizes."""
        found = backbone.config.get_text_config()
        for name in ("hidden_size", "vocab_size"):
            if getattr(found, name) != getattr(self.config, name):
                raise ValueError(f"{name}={getattr(found, name)} of the backbone must be {getattr(self.config, name)}")

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Follow the backbone's device and dtype."""
        self.to(device=backbone.device, dtype=backbone.dtype)

    def step(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] of what follows `tokens` [N], and new states [N, d] from those before them."""
        states = self.cell(self.backbone.get_input_embeddings()(tokens), states)
        return self.backbone.get_output_embeddings()(states), states

    def start(self, options: DraftOptions) -> DraftSession:
        """Return the session of one call of `generate`."""
        return GRUSession(self, options)

    # what MTPTrainer asks of a drafter (`tokenahead.extending.TrainableDrafter`)

    @property
    def num_losses(self) -> int:
        """Drafted tokens of a window: its first token is the backbone's own."""
        return self.window - 1

    def _targets(self, labels=None, attention_mask=None, position_ids=None, shift_labels=None) -> Tensor:
        """Return [B, L, n - 1], -100 where there is none: beyond padding and the borders of packed documents."""
        return depth_targets(labels, self.window, attention_mask, position_ids, shift_labels)[..., 1:]

    def loss_counts(self, *labels: Tensor | None) -> Tensor:
        """Return the targets per depth, [n - 1], from the arguments of `_targets`."""
        return (self._targets(*labels) != IGNORE).sum((0, 1))

    def pooled_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the mean over depths of their means."""
        return (sums / counts.clamp(min=1)).mean()

    def forward(
        self, input_ids, attention_mask=None, labels=None, position_ids=None, num_items_in_batch=None, **kwargs
    ) -> ModelOutput:
        """Return `loss` and `head_losses` [n - 1]; depth k at position t has read the tokens up to t + k."""
        with torch.no_grad():  # the backbone is frozen
            out = self.backbone(input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False)
        states = out.hidden_states[-1]
        given = labels, attention_mask, position_ids, kwargs.get("shift_labels")
        targets = self._targets(*given)
        tokens, sums = input_ids, []
        for depth in range(self.num_losses):
            tokens = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)  # behind the end: no targets
            logits, states = self.step(tokens.flatten(), states.flatten(0, 1))
            states = states.view(*tokens.shape, -1)
            sums.append(nn.functional.cross_entropy(logits, targets[..., depth].flatten(), reduction="sum"))
        own = self.loss_counts(*given)
        counts = own if num_items_in_batch is None else num_items_in_batch  # of the whole update
        total = torch.stack(sums)
        return ModelOutput(loss=self.pooled_loss(total, counts), head_losses=(total / own.clamp(min=1)).detach())
