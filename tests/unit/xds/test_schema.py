"""The committed descriptors: complete, and apart from the default pool."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from controlplane.xds.resource_set import TYPES
from controlplane.xds.schema import DESCRIPTORS, TYPE_PREFIX
from tests.unit.xds.topologies import schema


def test_each_file_comes_after_its_dependencies() -> None:
    """So a pool can take one after the other, and none is missing."""
    known: set[str] = set()
    for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        assert known.issuperset(file.dependency), file.name
        known.add(file.name)


def test_every_type_has_a_message() -> None:
    """The four types, and the messages of the stream."""
    for url in TYPES:
        assert schema().message(url.removeprefix(TYPE_PREFIX)).DESCRIPTOR.full_name in url
    schema().message("envoy.service.discovery.v3.DiscoveryRequest")


def test_the_default_pool_stays_without_them() -> None:
    """Another package with the same files could not be imported beside them."""
    schema()
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("envoy.config.cluster.v3.Cluster")
