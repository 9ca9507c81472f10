"""tests/kubernetes/kubectl.py: the cluster that calls reach, and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.kubectl import AlreadyExists, KubectlError, TooManyRequests, in_context

PROGRAM = """#!/bin/sh
case "$*" in
*current-context) cat {folder}/current 2>/dev/null || {{ echo "error: current-context is not set" >&2; exit 1; }} ;;
*fail*) echo "Error from server ($(cat {folder}/reason)): no" >&2; exit 1 ;;
*) echo "$*" ;;
esac
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program with the current context of a file; other calls print their words."""
    path = tmp_path / "kubectl"
    path.write_text(PROGRAM.format(folder=tmp_path), "utf-8")
    path.chmod(0o755)
    return str(path)


async def test_calls_stay_with_the_context_of_the_start(program: str, tmp_path: Path) -> None:
    """A user changes the current context during a trial: its namespace must not be deleted on another cluster."""
    (tmp_path / "current").write_text("first\n", "utf-8")
    calls = await in_context(program, "", "", "mine")
    (tmp_path / "current").write_text("second\n", "utf-8")
    assert calls.context == "first"
    assert await calls.run("delete", "it") == "--context first --namespace mine delete it\n"


async def test_a_chosen_context_counts(program: str) -> None:
    """No current context is needed then, and without either there is a sentence."""
    calls = await in_context(program, "some/file", "mine", "trial")
    assert await calls.run("get") == "--kubeconfig some/file --context mine --namespace trial get\n"
    with pytest.raises(KubectlError, match="current-context is not set"):
        await in_context(program, "", "", "trial")


async def test_a_refusal_has_the_type_of_its_reason(program: str, tmp_path: Path) -> None:
    """Other reasons are plain errors."""
    calls = await in_context(program, "", "mine", "trial")
    for reason, kind in (
        ("TooManyRequests", TooManyRequests),
        ("AlreadyExists", AlreadyExists),
        ("Forbidden", KubectlError),
    ):
        (tmp_path / "reason").write_text(reason, "utf-8")
        with pytest.raises(KubectlError) as told:
            await calls.run("fail")
        assert type(told.value) is kind
