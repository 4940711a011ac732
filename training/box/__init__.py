"""The model in the box: how it is loaded, and how it was trained and measured. Names are loaded when they are used."""

from ..lazy import lazy_names

_HOMES = {"BoxDamagedError": "folder", "box_folder": "folder", "load_box": "folder", "load_heads": "folder"}
__all__ = list(_HOMES)
# imported only when asked for: reading a box needs less than training one
__getattr__ = lazy_names(__name__, _HOMES)
