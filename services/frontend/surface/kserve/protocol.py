"""Message classes of `inference.GRPCInferenceService`, from tritonclient.

The package `tritonclient.grpc` imports its clients and numpy, 17 MB in each frontend. So its two modules of messages are
imported without the package. A later import of the package finds them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

SERVICE_NAME: Final = "inference.GRPCInferenceService"

_PACKAGE: Final = "tritonclient.grpc"


def _module(name: str) -> Any:
    """Return the module `name` of tritonclient.grpc, imported without the package."""
    if _PACKAGE in sys.modules:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    found = find_spec(_PACKAGE.partition(".")[0])
    assert found is not None and found.submodule_search_locations, "tritonclient is a dependency of kvmesh"
    bare = ModuleType(_PACKAGE)
    bare.__path__ = [str(Path(found.submodule_search_locations[0], "grpc"))]
    sys.modules[_PACKAGE] = bare
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    finally:
        del sys.modules[_PACKAGE]


model_config_pb2: Final[Any] = _module("model_config_pb2")
service_pb2: Final[Any] = _module("service_pb2")
