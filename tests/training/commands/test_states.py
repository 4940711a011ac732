"""`features_engine` of a run: its states come from a vLLM server, here a stand-in."""

from tests.training.test_states import serving
from tokenahead import MTPHeads
from tokenahead.training.commands.train import build, train
from tokenahead.training.features import FeatureDataset

HEADS = {"drafter": "heads", "drafter_options": {"window": 2}}


def test_states_of_a_server_are_stored_and_learned_from(tmp_path, settings_of):
    settings = settings_of(**HEADS, max_steps=1, eval_strategy="no", features=str(tmp_path / "states"))
    drafter = MTPHeads.from_backbone(build(settings).backbone, window=2)
    with serving(drafter, tmp_path / "files") as endpoint:
        settings.drafter.features_engine = {"url": endpoint.url, "folder": str(tmp_path / "files")}
        train(settings)
    assert len(FeatureDataset(tmp_path / "states")) and not list((tmp_path / "files").glob("*.safetensors"))
