"""The Docker engine of this machine, and a check for the images that a test needs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import docker
from docker.errors import DockerException, ImageNotFound


@contextmanager
def connected() -> Iterator[docker.DockerClient]:
    """Yield a client of the Docker engine and close it. Raises DockerException if no engine answers."""
    client = docker.from_env(timeout=60)
    try:
        yield client
    finally:
        client.close()


def missing(images: Sequence[str]) -> str:
    """Return one sentence on why containers of `images` cannot run here; empty if they can."""
    reason, image = "", ""
    try:
        with connected() as client:
            client.ping()
            for image in images:
                client.images.get(image)
    except ImageNotFound:
        reason = f"Docker has no image {image}: run `make images`."
    except DockerException as error:
        reason = f"No Docker engine answers here: {error}."
    if reason:
        # docker-py leaves the socket of a failed connection to the garbage collector, which warns.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    return reason
