"""Current images, and a client of the Docker engine that has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import docker
import pytest

from tests.integration.containers import daemon
from tests.integration.images import builds
from tests.integration.images.compose import Project, compose_command, project


@pytest.fixture(scope="session")
def images(needs_images: Callable[..., None]) -> None:
    """All images, built from this working tree."""
    needs_images()
    builds.build("--if-possible")
    needs_images(*builds.ALL)


@pytest.fixture
def client(images: None) -> Iterator[docker.DockerClient]:
    """The Docker engine that has the images."""
    with daemon.connected() as client:
        yield client


@pytest.fixture
def small_mesh(client: docker.DockerClient) -> Iterator[Project]:
    """The mesh of the compose file under a name of its own, not started yet."""
    command = compose_command()
    if not command:
        reason = "neither `docker compose` nor docker-compose is installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}. On CI the compose file must be tested.", pytrace=False)
        pytest.skip(f"NOT TESTED, the compose file: {reason}")
    with project(command, client) as made:
        yield made
