"""kvmesh: a gRPC mesh that serves large language models.

This package is shared by all services. It imports the generated stubs, and no module of a service or an engine.
"""

from typing import Final

__version__: Final = "0.1.0"
