"""The version of TensorRT-LLM that this package was written against, and the check of the installed one. Pure.

The sources were read file by file: docstrings name a file of NVIDIA/TensorRT-LLM and its commit, as `result.py@a678b91a`.
Not run on a GPU yet.
"""

from typing import Final

PINNED: Final = "1.2.1"
"""The newest release on PyPI when this package was written. The files that were read are from between 1.2 and 1.3."""

READ: Final = ("1.2", "1.3")
"""Release series whose sources were read."""


class VersionRefused(Exception):
    """The installed TensorRT-LLM cannot run this model. The text is one sentence."""


def check(version: str) -> str | None:
    """Return a warning for a release series that was not read, or None.

    Another minor version may lack a keyword, which fails at the first call that needs it. Raises VersionRefused for
    another major version: its LLM API may differ anywhere.
    """
    series = ".".join(version.split(".")[:2])
    if series in READ:
        return None
    allowed = " and ".join(READ)
    if series.split(".")[0] != PINNED.split(".")[0]:
        raise VersionRefused(
            f"TensorRT-LLM {version} is installed: allowed are {allowed}, tested is {PINNED}."
        )
    return f"TensorRT-LLM {version} is installed; this model was written against {allowed}"
