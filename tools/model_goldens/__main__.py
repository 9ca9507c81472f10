"""Write the folders and the goldens of all families: `python -m tools.model_goldens FOLDER`.

Needs transformers, in an environment of its own (`make goldens`): kvmesh and its tests do without.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any, Final

import transformers  # type: ignore[import-not-found]  # in an environment of its own
from transformers import PreTrainedTokenizerFast

from tools.model_goldens import dialogues, folders

DIALOGUES: Final = 200
SEQUENCES: Final = 2000
TEXTS: Final = 200


def main() -> None:
    """Write FOLDER/FAMILY with the files of the model, and FOLDER/FAMILY/goldens.json.gz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for number, family in enumerate(folders.FAMILIES):
        folders.write(family, folder / family)
        goldens = make(folder / family, random.Random(number))
        data = json.dumps(goldens, ensure_ascii=False).encode()
        (folder / family / "goldens.json.gz").write_bytes(gzip.compress(data, mtime=0))
        counts = ", ".join(f"{len(value)} {key}" for key, value in goldens.items() if isinstance(value, list))
        errors = sum("error" in each for each in goldens["dialogues"])
        print(f"{family}: {counts}; {errors} dialogues are refused")


def make(folder: Path, draw: random.Random) -> dict[str, Any]:
    """Return the goldens of one family."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    texts = [dialogues.text(draw) for _ in range(TEXTS)]
    made: dict[str, Any] = {
        "transformers": transformers.__version__,
        "dialogues": [],
        "texts": [{"text": text, "ids": tokenizer(text).input_ids} for text in texts],
        "sequences": [],
    }
    if tokenizer.chat_template:
        made["dialogues"] = [_dialogue(tokenizer, draw) for _ in range(DIALOGUES)]
    for _ in range(SEQUENCES):
        ids = _ids(tokenizer, draw)
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        made["sequences"].append({"ids": ids, "text": text})
    return made


def _dialogue(tokenizer: Any, draw: random.Random) -> dict[str, Any]:
    source = tokenizer.get_chat_template()
    asked = dialogues.dialogue(draw, system="not supported" not in source, tools="tools" in source)
    try:
        ids = tokenizer.apply_chat_template(
            asked["messages"],
            tools=asked.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
            **asked.get("arguments", {}),
        )
    except Exception as error:  # noqa: BLE001  # the template's own refusal
        return {**asked, "error": f"{type(error).__name__}: {error}"}
    return {**asked, "ids": ids}


def _ids(tokenizer: Any, draw: random.Random) -> list[int]:
    """Return ids at random, or those of a text with a cut at each end: characters and bytes are torn there."""
    if draw.random() < 0.5:
        return [draw.randrange(len(tokenizer)) for _ in range(draw.randint(0, 24))]
    ids = tokenizer(dialogues.text(draw) + dialogues.text(draw), add_special_tokens=False).input_ids
    first = draw.randint(0, 3)
    return list(ids[first : first + draw.randint(1, 40)])


if __name__ == "__main__":
    main()
