"""A mode under which every operation raises that would make the host wait for an accelerator, or copy a list to it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2"}


class NoSync(TorchDispatchMode):
    """Raises on `.item()`, `bool()`, boolean indices, tensors made from numbers; `.tolist()` it cannot see."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name in WAITS or name == "lift_fresh":
            raise AssertionError(f"{name} waits for the device")
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        if any(index is not None and index.dtype == torch.bool for index in indices):
            raise AssertionError("a boolean index waits for the device")
        return func(*args, **kwargs or {})
