"""The picture of the demo in the documents is made of a recorded run in which no token was lost."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from kvmesh.config import ROOT


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_picture", ROOT / "tools" / "demo_picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_current() -> None:
    """`make docs` writes it again."""
    tool = _tool()
    assert tool.PICTURE.read_text(encoding="utf-8") == tool.picture()


def test_the_picture_shows_both_kills_and_no_news_of_the_supervisor() -> None:
    """News stand in the middle of a sentence, so they are cut out; the answer's own text stays whole."""
    tool = _tool()
    text = tool.shown(
        "x\nThe same 9 a.\n\nof thedecode-1 ended by SIGKILL; it is started again.\n two\n"
    ).plain
    assert text == "The same 9 a.\n\nof the two"
    whole = tool.shown(tool.RECORDED.read_text(encoding="utf-8")).plain
    assert len(tool.KILL.findall(whole)) == 2 and "0 were lost" in whole and "started again" not in whole
