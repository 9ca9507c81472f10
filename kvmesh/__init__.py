"""kvmesh: a gRPC mesh that serves large language models.

This package is what every service shares. It imports the generated stubs and
nothing of a service or an engine.
"""

from typing import Final

__version__: Final = "0.1.0"
