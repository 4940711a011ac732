"""Lossless drafts: `model.generate(custom_generate=DIRECTORY, trust_remote_code=True, drafter=...)`, as the Hub has it.

`drafter` is a directory or a name on the Hub (heads, an EAGLE head or a student), an object of tokenahead, or left out:
n-grams of the text itself.
"""

from typing import Any

from tokenahead import NgramDrafter
from tokenahead.modeling.common.loading import read_drafter


def generate(model: Any, drafter: Any = None, **kwargs: Any) -> Any:
    """Decode with drafts; everything else is as in `generate`."""
    drafter = NgramDrafter() if drafter is None else drafter
    drafter = read_drafter(drafter, model.dtype, model).to(model.device) if isinstance(drafter, str) else drafter
    is_new = not drafter.is_attached
    drafter.attach(model)
    try:
        return model.generate(**kwargs | {"assistant_model": drafter})
    finally:
        if is_new:
            drafter.detach()
