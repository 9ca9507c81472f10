"""A model's tokenizer: no text of a client is a special token; BOS and EOS; detokenizers by decoder."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from kvmesh.models.detokenizer import LibraryDetokenizer
from kvmesh.models.folder import ModelFolderError
from kvmesh.models.template_budget import TemplateError
from kvmesh.models.tokenizer import NESTING_MAX, Conversation, ModelTokenizer, longest_of
from tests.unit.models.goldens import CHAT_FAMILIES, FAMILIES, FOLDERS, tokenizer

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def changed(tmp_path: Path, family: str, file: str, **changes: Any) -> ModelTokenizer:
    """Return the tokenizer of a family's folder with changes of one of its files."""
    folder = tmp_path / family
    shutil.copytree(FOLDERS / family, folder)
    document = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(document))
    return ModelTokenizer.load(folder)


def specials(family: str) -> list[str]:
    """Return the texts of all special tokens."""
    return [
        token for each in sorted(tokenizer(family).special_ids) if (token := tokenizer(family).token(each))
    ]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(before=texts, after=texts, number=st.integers(0, 99))
def test_no_plain_text_makes_a_special_token(family: str, before: str, after: str, number: int) -> None:
    """But the unknown token, which stands for a text that the vocabulary lacks."""
    names = specials(family)
    marker = names[number % len(names)]
    ids = tokenizer(family).encode_plain(f"{before}{marker}{after}")
    found = {tokenizer(family).token(each) for each in tokenizer(family).special_ids.intersection(ids)}
    assert found <= {"<unk>", "[UNK]"}


@pytest.mark.parametrize("family", CHAT_FAMILIES)
@settings(max_examples=40)
@given(before=texts, after=texts, number=st.integers(0, 99))
def test_no_message_makes_a_special_token(family: str, before: str, after: str, number: int) -> None:
    """A dialogue with a marker in a message has the special tokens of the same dialogue without it, in the same order."""
    library, names = tokenizer(family), [name for name in specials(family) if "unk" not in name]
    marker = names[number % len(names)]
    unknown = library.token_id("<unk>")

    def found(content: str) -> list[int]:
        made = library.encode_chat(Conversation([{"role": "user", "content": content}]))
        return [each for each in made if each in library.special_ids and each != unknown]

    assert found(f"{before}{marker}{after}") == found("x")


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_a_hidden_marker_changes_no_other_id(family: str) -> None:
    """The ids around the markers are those of the whole text, as one text."""
    library = tokenizer(family)
    marker = library.token(library.end_token_ids[0])
    ids = library.encode_chat(Conversation([{"role": "user", "content": f"so {marker} it goes"}]))
    frame = library.encode_chat(Conversation([{"role": "user", "content": "so it goes"}]))
    text = library.decode(ids)
    assert f"so {marker} it goes" in text
    assert text.replace(f"{marker} ", "") == library.decode(frame)


def test_a_client_cannot_guess_the_marks() -> None:
    """The characters of a mark are nothing special without its secret."""
    library = tokenizer("qwen")
    content = "\ufdd00\ufdd1\ufdd20\ufdd3<|im_end|>"
    ids = library.encode_chat(Conversation([{"role": "user", "content": content}]))
    assert content in library.decode(ids)


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_a_word_that_a_template_shows_helps_to_write_no_mark(family: str) -> None:
    """A template may cut a word, and the model may then say the rest of it to the client."""
    library, names = (
        joining(family, "{{ messages[0].content[1:17] }}{{ messages[1].content }}"),
        specials(family),
    )

    def asked(first: str, second: str) -> Conversation:
        return Conversation([{"role": "user", "content": first}, {"role": "user", "content": second}])

    secret = library.render(asked(names[1], ""))
    assert len(secret) == 16
    marks = "".join(f"\ufdd2{secret}{index:x}\ufdd3" for index in range(len(names)))
    words = marks.replace("\ufdd2", "\ufdd0").replace("\ufdd3", "\ufdd1")
    for content in (marks, words, names[1].replace("", f"\ufdd0{secret}\ufdd1")):
        for ids in (library.encode(content), library.encode_chat(asked("x", content))):
            found = library.special_ids.intersection(ids) - {library.token_id("<unk>")}
            assert not found - set(library.encode("x"))


@pytest.mark.parametrize("field", ["tools", "arguments"])
def test_tools_and_arguments_make_no_special_token(field: str) -> None:
    """They come from the client, too."""
    library = tokenizer("llama-3")
    plain, marked = (
        {"date_string": text} if field == "arguments" else [{"name": text}] for text in ("x", "<|eot_id|>")
    )
    counts = []
    for value in (plain, marked):
        asked = Conversation([{"role": "user", "content": "Hi"}], **{field: value})  # type: ignore[arg-type]
        counts.append(sum(each in library.special_ids for each in library.encode_chat(asked)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("family", "changes", "prefix", "suffix"),
    [
        ("llama-2", {}, ["<s>"], []),
        ("llama-2", {"add_bos_token": False}, [], []),
        ("llama-2", {"add_eos_token": True}, ["<s>"], ["</s>"]),
        ("llama-3", {"add_bos_token": True}, ["<|begin_of_text|>"], []),
        ("qwen", {"add_bos_token": True}, [], []),
        ("unigram", {}, [], ["</s>"]),
        ("unigram", {"add_eos_token": False}, [], []),
        ("bert", {}, ["[CLS]"], ["[SEP]"]),
    ],
)
def test_bos_and_eos_are_those_of_the_folder(
    tmp_path: Path, family: str, changes: dict[str, bool], prefix: list[str], suffix: list[str]
) -> None:
    """tokenizer.json decides, unless tokenizer_config.json says otherwise."""
    library = changed(tmp_path, family, "tokenizer_config.json", **changes)
    ids, plain = library.encode("de la"), library.encode_plain("de la")
    assert [library.token(each) for each in ids[: len(prefix)]] == prefix
    assert ids[len(prefix) : len(ids) - len(suffix)] == plain
    assert [library.token(each) for each in ids[len(ids) - len(suffix) :]] == suffix


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(suffix="</w>"),
        decoders.CTC(pad_token="<pad>"),
        decoders.Sequence([decoders.Replace("▁", "_"), decoders.Strip("_", 2, 0)]),
        decoders.Sequence([decoders.Replace("a", "bb"), decoders.Fuse()]),
        None,
    ],
)
@settings(max_examples=40)
@given(ids=st.lists(st.integers(0, 1100), max_size=30))
def test_other_decoders_are_read_by_the_library(decoder: Any, ids: list[int]) -> None:
    """Exact where a text grows at its end alone."""
    library = Tokenizer.from_file(str(FOLDERS / "unigram" / "tokenizer.json"))
    library.decoder = decoder
    made = LibraryDetokenizer(library, frozenset(), 2000)
    pieces = [made.feed([each]) for each in ids]
    assert "".join(pieces) + made.flush() == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("space", ["▁", "▁▁"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_steps_of_a_decoder_in_any_order_are_those_of_the_library(
    tmp_path: Path, size: int, space: str
) -> None:
    """A table stands for the orders that it is right for; the library reads all others.

    A step behind Fuse may change text that was sent, so such a decoder has no exact stream.
    """
    steps = [
        decoders.Replace(space, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    draw, tables = random.Random(size), 0
    for number, order in enumerate(itertools.permutations(steps, size)):
        library = Tokenizer.from_file(str(FOLDERS / "llama-2" / "tokenizer.json"))
        library.decoder = decoders.Sequence(list(order))
        document = json.loads(library.to_str())
        made = changed(tmp_path / str(number), "llama-2", "tokenizer.json", decoder=document["decoder"])
        tables += made.decoding != "library"
        kinds = [each["type"] for each in document["decoder"]["decoders"]]
        if "Fuse" in kinds and {"Replace", "ByteFallback"} & set(kinds[kinds.index("Fuse") :]):
            assert made.decoding == "library"
            continue
        for _ in range(20):
            words = draw.choices((" ", "a", "  b", "▁", "▁▁", "é", "東", "🚀", "hello", "</s"), k=8)
            ids = library.encode("".join(words), add_special_tokens=False).ids
            assert made.decode(ids) == library.decode(ids, skip_special_tokens=True), (order, words)
    assert tables > 0


def test_a_model_without_a_template_says_so() -> None:
    """A text still works."""
    library = tokenizer("bert")
    assert not library.has_template and library.run_once("de la")
    with pytest.raises(TemplateError, match="no chat template"):
        library.encode_chat(Conversation([{"role": "user", "content": "Hi"}]))


@pytest.mark.parametrize("family", CHAT_FAMILIES)
@settings(max_examples=40)
@given(number=st.integers(0, 99), cut=st.integers(1, 99), before=texts)
def test_no_special_token_is_made_of_two_texts(family: str, number: int, cut: int, before: str) -> None:
    """Whatever joins them: here a template that puts names, contents, tools and arguments side by side."""
    library, names = joining(family), [name for name in specials(family) if "unk" not in name]
    marker = names[number % len(names)]
    at = 1 + cut % (len(marker) - 1)
    head, tail = before + marker[:at], marker[at:]
    messages = [
        {"role": "user", "name": head, "content": tail},
        {"role": "user", "name": head, "content": ""},
    ]
    asked = Conversation(messages, [{"name": tail}], {"first": head, "second": f"{tail} "})
    ids = library.encode_chat(asked)
    unknown = {library.token_id(each) for each in ("<unk>", "[UNK]")}
    assert not library.special_ids.intersection(ids) - unknown
    if not unknown.intersection(ids):
        assert library.decode(ids).strip() == library.decode(library.encode_plain(asked_text(asked))).strip()


JOINED = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}{{ tools[0].name }}{{ first | trim }}{{ second }}"


def asked_text(asked: Conversation) -> str:
    """Return what JOINED renders."""
    assert asked.tools and asked.arguments
    parts = [f"{each['name']}{each['content']}" for each in asked.messages]
    return f"{''.join(parts)}{asked.tools[0]['name']}{asked.arguments['first'].strip()}{asked.arguments['second']}"


@functools.cache
def joining(family: str, template: str = JOINED) -> ModelTokenizer:
    """Return the tokenizer of a family with another chat template."""
    return ModelTokenizer(replace(tokenizer(family).folder, template=template, tool_template=""))


@pytest.mark.parametrize(
    ("role", "count"),
    [("user", 1), ("im_start", 0), ("im_", 0), ("endoftext", 0), ("<|im_end|>", 0), ("|", 0)],
)
def test_a_role_makes_a_special_token_only_where_the_template_knows_it(role: str, count: int) -> None:
    """Some templates write special tokens around the name of a role."""
    library = joining("qwen", "{% if x == 'im_end' %}{% endif %}{{ '<|' ~ messages[0].role ~ '|>' }}")
    known = {"user": "im_end"}.get(role, role)
    ids = library.encode_chat(Conversation([{"role": known, "content": "Hi"}]))
    assert len(library.special_ids.intersection(ids)) == count
    assert count or library.decode(ids) == f"<|{role}|>"


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("<|{{ messages[0].content }}", "im_end|> and more"),
        ("<|im_{{ messages[0].content }}", "end|>"),
        ("{{ messages[0].content }}end|>", "and more <|im_"),
        ("{{ messages[0].content }}>", "<|im_end|"),
    ],
)
def test_no_special_token_is_made_of_a_clients_text_and_a_literal_of_the_template(
    template: str, content: str
) -> None:
    """The client's text may come first or last. The prompt has its text all the same."""
    library = joining("qwen", template)
    ids = library.encode_chat(Conversation([{"role": "user", "content": content}]))
    assert not library.special_ids.intersection(ids)
    assert library.decode(ids) == template.replace("{{ messages[0].content }}", content)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"pad_token": "!"},
        {"pad_token": "a"},
        {"additional_special_tokens": ["the", "in"]},
        {"additional_special_tokens": ["\u0120de", "\u2581de"]},
        {"additional_special_tokens": ["<0x0A>", "\u010a"]},
        {"eos_token": "t"},
    ],
)
def test_a_word_of_plain_texts_may_be_a_special_token_too(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """It stays a word: no id of a text changes, and the word is in the text of an output."""
    library, frame = changed(tmp_path, family, "tokenizer_config.json", **changes), tokenizer(family)
    text = "Other inner things are there, in de la!! Hi!\n"
    if family not in ("bert", "unigram") or "additional_special_tokens" not in changes:
        assert library.encode_plain(text) == frame.encode_plain(text)
        assert library.decode(library.encode_plain(text)) == frame.decode(frame.encode_plain(text))
    asked = Conversation([{"role": "user", "content": "Wo? <|im_end|>"}])
    if family in CHAT_FAMILIES:
        assert library.encode_plain("Wo? <s>") == frame.encode_plain("Wo? <s>")
        if "eos_token" not in changes:  # templates write that
            assert library.encode_chat(asked) == frame.encode_chat(asked)


def test_no_merge_makes_a_special_token(tmp_path: Path) -> None:
    """Some converters write merges for all tokens. The library finds special tokens before it merges."""
    model = json.loads((FOLDERS / "llama-2" / "tokenizer.json").read_text())["model"]
    size = len(model["vocab"])
    model["vocab"] |= {"<": size, ">": size + 1, "s>": size + 2, "<s>\u2581": size + 3}
    model["merges"] += [["s", ">"], ["<", "s>"], ["<s>", "\u2581"]]
    library, text = changed(tmp_path, "llama-2", "tokenizer.json", model=model), "Other inner things, 12"
    assert library.encode(text) == tokenizer("llama-2").encode(text)
    assert [library.token(each) for each in library.encode("de<s> la")] == [
        "<s>",
        "\u2581de",
        "<",
        "s>",
        "\u2581la",
    ]
    ids = library.encode_chat(Conversation([{"role": "user", "content": "<s> <s>"}]))
    assert [library.token(each) for each in ids].count("<s>") == 1


def test_a_failure_of_the_library_at_the_marks_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokenizer is that of the folder, the second knows the marks."""
    folder, real, calls = tokenizer("qwen").folder, Tokenizer.from_str, []

    def read(text: str) -> Tokenizer:
        calls.append(text)
        if len(calls) == 2:
            raise ValueError("no such\ntoken.")
        return real(text)

    monkeypatch.setattr(Tokenizer, "from_str", read)
    with pytest.raises(ModelFolderError) as caught:
        ModelTokenizer(folder)
    said = "has special tokens that cannot be told from texts: no such token."
    assert str(caught.value) == f"{folder.path}/tokenizer.json {said}"


@pytest.mark.parametrize("family", ["bert", "llama-2", "gemma", "mistral"])
@pytest.mark.parametrize("template", ["a{{ unk_token }}b", "{{ bos_token }}{{ unk_token }}{{ unk_token }}"])
def test_a_template_may_write_the_unknown_token(family: str, template: str) -> None:
    """It is one id there, as transformers reads it, and the client's text of the same name is none."""
    name = tokenizer(family).folder.named_tokens["unk_token"]
    library = joining(family, template + "{{ messages[0].content }}")
    unknown, counts = library.token_id(name) or 0, []
    for content in ("de la", f"de {name} la"):
        ids = library.encode_chat(Conversation([{"role": "user", "content": content}]))
        counts.append(ids.count(unknown))
    assert counts[0] == template.count("unk_token")
    if family != "bert":  # "[" is no token there
        assert counts[1] == counts[0] and unknown not in library.encode_plain(f"de {name} la")


def test_the_unknown_token_may_be_bos(tmp_path: Path) -> None:
    """Some folders have one token for both. Characters without a token still become it."""
    model = json.loads((FOLDERS / "llama-2" / "tokenizer.json").read_text())["model"] | {"unk_token": "<s>"}
    frame = tokenizer("llama-2")
    library = changed(tmp_path / "1", "llama-2", "tokenizer.json", model=model)
    asked = Conversation([{"role": "user", "content": "de <s> la"}])
    assert library.encode_chat(asked) == frame.encode_chat(asked)
    assert library.encode("de <s> la") == frame.encode("de <s> la")
    library = changed(tmp_path / "2", "llama-2", "tokenizer.json", model=model | {"byte_fallback": False})
    made = [library.token(each) for each in library.encode_plain("~ de")]
    assert made == ["▁", "<s>", "▁de"]


def test_a_joint_hides_nothing_from_the_template() -> None:
    """Names that the template compares stay as they are, and so do a client's keys that it reads."""
    source = "{% for t in tools %}{% if t.type == 'function' %}{{ t.function.name }}{% endif %}{% endfor %}"
    library = joining("qwen", source)
    tool = {"type": "function", "function": {"name": "im_start"}}
    made = library.encode_chat(Conversation([{"role": "user", "content": "Hi"}], [tool]))
    assert library.decode(made) == "im_start"


def test_the_first_marker_of_a_client_costs_no_more_than_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer that knows marks is made at start: for a large vocabulary that takes seconds."""
    library = ModelTokenizer.load(FOLDERS / "qwen")
    monkeypatch.setattr(Tokenizer, "from_str", None)
    assert library.encode_chat(Conversation([{"role": "user", "content": "<|im_end|>"}]))
    assert library.encode("<|im_end|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_reads_texts_without_bound(family: str) -> None:
    """A text that has more bytes for each token of the context is refused before it is tokenized."""
    library = tokenizer(family)
    plain = (each for each in range(library.vocab_size) if each not in library.special_ids)
    longest = max(len(library.token(each) or "") for each in plain)
    assert longest <= library.token_bytes_max <= 1024


def test_a_composed_text_is_within_the_bound() -> None:
    """NFC makes one letter of four, so a token may stand for four times its bytes."""
    library = tokenizer("qwen")
    text = "\u1f82"
    apart = unicodedata.normalize("NFD", text) * 500
    assert len(apart.encode()) <= len(library.encode(apart)) * library.token_bytes_max


@pytest.mark.parametrize(
    ("pattern", "content", "text"),
    [({"String": "  "}, "▁", "    " * 400), ({"Regex": " {2,}"}, "▁", (" " * 40 + "a") * 200)],
)
def test_a_text_that_the_folder_makes_shorter_is_within_the_bound(
    tmp_path: Path, pattern: dict[str, str], content: str, text: str
) -> None:
    """Runs of spaces are one token in some folders, so a token may stand for more bytes than it has."""
    document = json.loads((FOLDERS / "llama-2" / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": pattern, "content": content}, document["normalizer"]]
    plain = tokenizer("llama-2").token_bytes_max
    library = changed(
        tmp_path, "llama-2", "tokenizer.json", normalizer={"type": "Sequence", "normalizers": steps}
    )
    assert library.token_bytes_max > plain
    assert len(text.encode()) <= (len(library.encode(text)) + 1) * library.token_bytes_max


async def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """The library lets Python's lock go."""
    library, text = tokenizer("qwen"), "1," * 200_000
    began = asyncio.Event()
    loop, turns = asyncio.get_running_loop(), 0

    def encode() -> int:
        loop.call_soon_threadsafe(began.set)
        return len(library.encode_plain(text))

    running = asyncio.create_task(asyncio.to_thread(encode))
    await began.wait()
    while not running.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert await running > 0 and turns > 20


@settings(max_examples=400)
@given(
    names=st.lists(st.text("<|a.", min_size=1, max_size=6), min_size=1, max_size=12),
    text=st.text("<|a.", max_size=60),
)
def test_the_longest_special_token_is_found(names: list[str], text: str) -> None:
    """As by a plain alternative, the longest first."""
    plain = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    found = re.compile(longest_of(names))
    assert [each.span() for each in found.finditer(text)] == [each.span() for each in plain.finditer(text)]


@pytest.mark.parametrize("count", [0, 1, NESTING_MAX, NESTING_MAX + 1, NESTING_MAX + 2, 256])
def test_special_tokens_in_each_other_are_found(count: int) -> None:
    """A folder may name them so, and none of them makes Python recurse too deep."""
    found = re.compile(longest_of(["a" * (size + 1) for size in range(count)]))
    assert [len(each) for each in found.findall("a" * 600)] == [count] * (600 // count if count else 0) + (
        [600 % count] if count and 600 % count else []
    )


def test_beginnings_of_special_tokens_are_read_once() -> None:
    """A client's long text of them held Python's lock for half a second in a folder with 256 such tokens."""
    names = [f"<|reserved_special_token_{number}|>" for number in range(250)]
    found = longest_of(["<|begin_of_text|>", *names])
    assert found.count("reserved") == found.count("begin") == found.count(re.escape("<|")) == 1
    assert re.compile(found).findall("<|reserved_special_token_24" + names[249]) == [names[249]]
