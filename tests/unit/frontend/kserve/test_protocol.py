"""The messages of tritonclient are imported without its clients, and are the same for a later import of them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import services.frontend.surface.kserve.served_models
from services.frontend.surface.kserve.protocol import service_pb2
assert "numpy" not in sys.modules and "tritonclient.grpc" not in sys.modules
import tritonclient.grpc
assert tritonclient.grpc.service_pb2 is service_pb2 and tritonclient.grpc.InferInput
"""


def test_a_frontend_loads_no_client_of_triton() -> None:
    """Nor numpy: 17 MB."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
