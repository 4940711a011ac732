"""Release: measured results, the model card made from them, and the push to the Hub. Measures nothing itself."""

from ..training.results import DecodingResult, MeasuredResults
from .card import render_card, write_card
from .custom_generate import publish_generate
from .push import push_to_hub

__all__ = ["DecodingResult", "MeasuredResults", "publish_generate", "push_to_hub", "render_card", "write_card"]
