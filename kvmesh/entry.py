"""Entry of a program: imports it without garbage collection, which frees nothing while modules load."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import NoReturn


def run(module: str) -> NoReturn:
    """Import `module`, call its `main`, and exit with what that returns.

    Garbage collection runs again from the call on. It skips the imported objects, which live as long as the process.
    """
    gc.disable()
    try:
        main = import_module(module).main
        gc.freeze()
    finally:
        gc.enable()
    sys.exit(main())
