"""docs/xds.md and the files of deploy/xds say what the tests use."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from controlplane.xds.publication import Publication
from controlplane.xds.resource_set import CLUSTER, ROUTES
from kvmesh.config import ROOT, MeshConfig
from tests.integration.xds.mesh import OPTIONS
from tests.unit.xds.topologies import EU_AND_US, schema

PAGE = (ROOT / "docs" / "xds.md").read_text("utf-8")
NAME = MeshConfig().mesh.name


def test_the_options_of_the_page_are_those_of_the_tests() -> None:
    """The figures of the page are for these values."""
    rows = re.findall(r"(?m)^\| `(grpc\.[a-z0-9_.]+)` \| (\d+) \|", PAGE)
    assert {key: int(value) for key, value in rows} == OPTIONS


def test_envoy_asks_for_resources_that_exist() -> None:
    """Its routes have the name of the mesh, and it takes all clusters."""
    text = (ROOT / "deploy" / "xds" / "envoy.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    publication = Publication(schema(), "eu")
    assert publication.offer(EU_AND_US)
    resources = publication.of(found["node"]["locality"]["region"])
    assert resources is not None
    (chain,) = found["static_resources"]["listeners"][0]["filter_chains"]
    routes = chain["filters"][0]["typed_config"]["rds"]["route_config_name"]
    assert routes in resources.by_type[ROUTES] and routes == NAME
    assert set(resources.by_type[CLUSTER]) == {NAME}


def test_the_bootstrap_keeps_what_a_server_leaves_out() -> None:
    """A deletion by mistake would end all calls."""
    found = json.loads((ROOT / "deploy" / "xds" / "bootstrap.json").read_text("utf-8"))
    assert all("ignore_resource_deletion" in one["server_features"] for one in found["xds_servers"])
    assert f"xds:///{NAME}" in PAGE
