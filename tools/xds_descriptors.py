"""Writes controlplane/xds/descriptors.binpb: the descriptors of the xDS messages that the role `xds` uses.

    .venv/bin/python tools/xds_descriptors.py

The descriptors come from the package xds-protos, in an environment of its own. In the mesh's environment xds-protos 1.85.0
would overwrite modules of googleapis-common-protos and of opentelemetry-proto. The files of envoyproxy/data-plane-api,
cncf/xds, bufbuild/protoc-gen-validate and googleapis are under the Apache License 2.0. Those of google/protobuf are under
BSD-3-Clause.
"""

from __future__ import annotations

import subprocess
from typing import Final

from bench.environments import environment
from kvmesh.config import ROOT

PACKAGE: Final = "xds-protos"
VERSION: Final = "1.85.0"
INTO: Final = ROOT / "controlplane" / "xds" / "descriptors.binpb"

MODULES: Final = (
    "envoy.service.discovery.v3.ads_pb2",
    "envoy.config.cluster.v3.cluster_pb2",
    "envoy.config.endpoint.v3.endpoint_pb2",
    "envoy.config.listener.v3.listener_pb2",
    "envoy.config.route.v3.route_pb2",
    "envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2",
    "envoy.extensions.filters.http.router.v3.router_pb2",
    "envoy.extensions.upstreams.http.v3.http_protocol_options_pb2",
)
"""Modules with the messages that are used. Their dependencies are added."""

PROGRAM: Final = """
import importlib, sys
from google.protobuf.descriptor_pb2 import FileDescriptorSet
found = {}
def add(file):
    if file.name not in found:
        for needed in file.dependencies:
            add(needed)
        found[file.name] = file
for module in sys.argv[1:]:
    add(importlib.import_module(module).DESCRIPTOR)
written = FileDescriptorSet()
for file in found.values():
    file.CopyToProto(written.file.add())
sys.stdout.buffer.write(written.SerializeToString(deterministic=True))
"""
"""Prints a FileDescriptorSet. Each file comes after its dependencies."""


def main() -> None:
    """Write the file."""
    python = environment(PACKAGE, VERSION) / "bin" / "python"
    done = subprocess.run([str(python), "-c", PROGRAM, *MODULES], check=True, capture_output=True)
    INTO.write_bytes(done.stdout)
    print(f"{INTO.relative_to(ROOT)}: {len(done.stdout)} bytes")


if __name__ == "__main__":
    main()
