"""tests/kubernetes/stage.py: the namespace of a trial, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.kubernetes import stage
from tests.kubernetes.kubectl import Kubectl
from tests.kubernetes.main import cancelled_by_sigterm
from tests.kubernetes.pods import Pods
from tests.kubernetes.stage import Namespace, Refused, Stage
from tests.unit.kubernetes.test_pods import event

PROGRAM = """#!/bin/sh
# The namespaces of a cluster: a file for each, which holds its label.
cd {folder}
case "$*" in
*create*)
    read -r body
    label=${{body##*kvmesh-trial\\": \\"}}
    set -C
    echo "${{label%%\\"*}}" 2>/dev/null >name || {{ echo "Error from server (AlreadyExists): no" >&2; exit 1; }} ;;
*delete*--selector*)
    selector=${{*#*kvmesh-trial=}}
    test "$(cat name)" != "${{selector%% *}}" || rm name ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Kubectl:
    """A cluster with one name, whose namespace is the file `name` in tmp_path."""
    path = tmp_path / "kubectl"
    path.write_text(PROGRAM.format(folder=tmp_path), "utf-8")
    path.chmod(0o755)
    return Kubectl(str(path), "", "here", "trial")


def said(_: str) -> None:
    """Ignore the progress."""


async def test_a_namespace_that_exists_is_refused_and_kept(cluster: Kubectl, tmp_path: Path) -> None:
    """Two trials of one name: the second one ends, the first goes on."""
    lines: list[str] = []
    async with Namespace(cluster, "1").made(said):
        with pytest.raises(Refused, match="The namespace trial exists"):
            async with Namespace(cluster, "2").made(lines.append):
                pass
        assert lines == [], "no word of a deletion"
        assert (tmp_path / "name").read_text("utf-8") == "1\n"
    assert not (tmp_path / "name").exists()


async def test_a_namespace_that_another_trial_made_meanwhile_is_kept(
    cluster: Kubectl, tmp_path: Path
) -> None:
    """Somebody deleted the first one by hand, and began a trial."""
    async with Namespace(cluster, "1").made(said):
        (tmp_path / "name").write_text("2\n", "utf-8")
    assert (tmp_path / "name").read_text("utf-8") == "2\n"


def test_sigterm_deletes_the_namespace(cluster: Kubectl, tmp_path: Path) -> None:
    """A job that its scheduler ends leaves nothing on the cluster."""
    seen = []

    async def trial() -> None:
        async with Namespace(cluster, "1").made(said):
            seen.append((tmp_path / "name").exists())
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled_by_sigterm(trial()))
    assert seen == [True]
    assert not (tmp_path / "name").exists()


async def test_a_pod_that_is_not_ready_is_awaited_and_named(
    cluster: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod may lose its readiness between two steps: the next one begins later, or has a violation."""
    pods = Pods()
    pods.take(event("ADDED", "redis-0", ready=False), 0.0)
    monkeypatch.setattr(stage, "READY_S", 0.01)
    with pytest.raises(Refused, match="redis are ready after 0 s: redis-0 is not ready"):
        await staged(cluster, pods).lose("redis")


async def test_a_pod_that_is_not_deleted_is_a_fault(
    cluster: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API accepted the deletion, but the watch tells of none."""
    pods = Pods()
    pods.take(event("ADDED", "redis-0"), 0.0)
    monkeypatch.setattr(stage, "DIAL_S", 0.01)
    assert await staged(cluster, pods).lose("redis") == ["redis-0 is not deleted after 0 s"]


def staged(kubectl: Kubectl, pods: Pods) -> Stage:
    """Return a stage of `pods`, whose watch goes on."""
    watch: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return Stage(kubectl, Namespace(kubectl, "1"), pods, watch)
