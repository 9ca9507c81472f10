"""ListModels and GetModel: what a request of each model may use now."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.config import MeshConfig
from kvmesh.errors import MeshError
from kvmesh.models.folder import SamplingDefaults, read
from kvmesh.models.tokenizer import ModelTokenizer
from services.frontend.requests.models import Models
from services.frontend.surface import served_versions
from services.frontend.surface.model_listing import ModelListing
from tests.unit.models.goldens import FOLDERS

CONFIG = MeshConfig()
SALT = CONFIG.engine.salt


def listing(features: dict[str, set[str]], up: set[str], family: str = "llama-3") -> ModelListing:
    """Return the listing of one model in the pools of `features`, of which those in `up` have a router."""
    folder = replace(read(FOLDERS / family), defaults=SamplingDefaults(temperature=0.5, top_k=7))
    versions = served_versions.of(CONFIG, {SALT: (ModelTokenizer(folder), folder)})
    (model,) = versions.models
    models = Models(model, {SALT: model}, [(pool, SALT) for pool in features])
    peers: Any = SimpleNamespace(
        features=lambda pool: frozenset(features[pool]) if pool in up else None,
        has_up=lambda pool, _: pool in up,
        can_place=lambda pool, _: pool in up,
    )
    pools: Any = SimpleNamespace(models=models, stable="a", default_model=model)
    return ModelListing(versions, pools, peers, 1234)


def test_a_request_may_use_what_all_pools_with_a_router_offer() -> None:
    """A pool without a router takes no feature away, and chat comes from the template."""
    both = {"a": {"penalties", "logit_bias", "unknown"}, "b": {"penalties"}}
    assert list(listing(both, {"a", "b"}).one("").model.capabilities) == ["chat", "penalties"]
    assert list(listing(both, {"a"}).one("").model.capabilities) == ["chat", "logit_bias", "penalties"]
    assert list(listing(both, {"a", "b"}, "bert").one("").model.capabilities) == ["penalties"]


def test_without_a_router_nothing_is_promised() -> None:
    """The model is listed, and does not serve."""
    made = listing({"a": {"penalties"}}, set()).all().models
    assert [(list(each.capabilities), each.serving) for each in made] == [(["chat"], False)]


def test_the_bounds_and_defaults_are_those_of_the_folder() -> None:
    """A default that the folder does not name is not set."""
    made = listing({"a": set()}, {"a"}).one("").model
    assert (made.message_bytes_max, made.serving, list(made.versions)) == (1234, True, [SALT])
    assert made.defaults.temperature == 0.5 and made.defaults.top_k == 7
    assert not made.defaults.HasField("top_p")


def test_an_unknown_model_is_refused_with_the_names() -> None:
    """A long name is cut."""
    with pytest.raises(MeshError, match="empty or one of") as caught:
        listing({"a": set()}, {"a"}).one("x" * 999)
    assert len(caught.value.violations[0].value) < 140
