"""Text in and out: tokenizer, detokenizer, stop strings, output."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvmesh.attach import frames
from kvmesh.config import ROOT
from kvmesh.models.tokenizer import Conversation, ModelTokenizer
from services.frontend.requests.output import Output
from services.frontend.requests.stop_strings import StopStrings

MODEL = ROOT / "engines/reference/model"
TOKENIZER = ModelTokenizer.load(MODEL)
LIBRARY = Tokenizer.from_str((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
TEXT_IDS = sorted(set(range(TOKENIZER.vocab_size)) - TOKENIZER.special_ids)


def encode_chat(*messages: tuple[str, str]) -> list[int]:
    """Return the ids of (role, content) messages."""
    return TOKENIZER.encode_chat(
        Conversation([{"role": role, "content": content} for role, content in messages])
    )


texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts)
def test_every_text_comes_back(text: str) -> None:
    """Encoding and decoding returns every Unicode text."""
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(texts, st.sampled_from(["<|end|>", "<|user|>", "<|assistant|>", "<|pad|>", "<|system|>"]), texts)
def test_no_text_makes_a_special_token(before: str, marker: str, after: str) -> None:
    """Template markers in a user's text become plain text, not special tokens."""
    ids = TOKENIZER.encode(before + marker + after)
    assert not TOKENIZER.special_ids.intersection(ids)
    chat = encode_chat(("user", before + marker + after))
    assert sum(each in TOKENIZER.special_ids for each in chat) == 3  # prefix, suffix, the model's turn
    assert TOKENIZER.decode(chat) == before + marker + after


def test_a_conversation_is_a_prefix_of_its_continuation() -> None:
    """A conversation's tokens are a prefix of its continuation's, so its blocks are found in the cache."""
    first = encode_chat(("system", "Be brief."), ("user", "Who is Emma?"))
    answer = TOKENIZER.encode(" A heroine.")
    second = encode_chat(
        ("system", "Be brief."), ("user", "Who is Emma?"), ("assistant", " A heroine."), ("user", "Why?")
    )
    assert second[: len(first) + len(answer)] == [*first, *answer]


@given(st.lists(st.sampled_from(TEXT_IDS)), st.randoms(use_true_random=False))
def test_pieces_join_to_the_whole_for_random_ids(ids: list[int], draw: random.Random) -> None:
    """Joined pieces equal the library's decoding, for random ids and any grouping."""
    detokenizer, pieces, at = TOKENIZER.detokenizer(), [], 0
    while at < len(ids):
        count = draw.randint(1, 4)
        pieces.append(detokenizer.feed(ids[at : at + count]))
        at += count
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == LIBRARY.decode(ids)


@given(texts)
def test_no_piece_cuts_a_character(text: str) -> None:
    """The text sent after each token is a prefix of the whole text, without replacement characters."""
    detokenizer, sent = TOKENIZER.detokenizer(), ""
    for each in TOKENIZER.encode(text):
        sent += detokenizer.feed((each,))
        assert text.startswith(sent)
    assert sent + detokenizer.flush() == text


def test_special_tokens_are_silent() -> None:
    """The end token is part of the output and has no text."""
    detokenizer = TOKENIZER.detokenizer()
    assert detokenizer.feed([*TOKENIZER.encode("yes"), *TOKENIZER.end_token_ids]) == "yes"


def naive_stop(text: str, strings: list[str]) -> tuple[str, str | None]:
    """Return (output, match) of a slow reference that tries every end."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


few = st.text("ab<|\n", min_size=1, max_size=5)


@given(st.lists(few, min_size=1, max_size=4), st.lists(st.text("ab<|\nc", max_size=4), max_size=30))
def test_stop_strings_match_across_borders_like_a_slow_reference(
    strings: list[str], pieces: list[str]
) -> None:
    """Output ends before the first complete stop string, and no part of a stop string was emitted."""
    whole, match = naive_stop("".join(pieces), strings)
    stop, sent = StopStrings(strings), ""
    for piece in pieces:
        sent += stop.feed(piece)
        assert whole.startswith(sent)
        if stop.matched is not None:
            break
    else:
        sent += stop.flush()
    assert (sent, stop.matched) == (whole, match)


@given(st.lists(few, min_size=1, max_size=4), st.lists(st.text("ab<|\nc", max_size=4), max_size=30))
def test_no_more_is_held_back_than_may_begin_a_stop_string(strings: list[str], pieces: list[str]) -> None:
    """Text is held back exactly while some stop string begins with it."""
    stop, text, sent = StopStrings(strings), "", ""
    for piece in pieces:
        text += piece
        sent += stop.feed(piece)
        if stop.matched is not None:
            return
        held = text[len(sent) :]
        assert not held or any(string.startswith(held) for string in strings)


def test_output_counts_the_token_that_completes_a_stop_string() -> None:
    """The output has the ids up to the match of a stop string, and no later ones."""
    ids = TOKENIZER.encode("alpha STOP beta")
    output = Output(TOKENIZER.detokenizer(), ["STOP"], with_logprobs=True)
    used = output.feed(ids, [-0.5] * len(ids))
    assert 0 < used < len(ids) and output.stop_string == "STOP"
    tokens = output.take()
    assert tokens is not None and output.take() is None
    assert (tokens.text, list(tokens.ids), tokens.position) == ("alpha ", ids[:used], 0)
    assert list(tokens.logprobs) == [-0.5] * used


def test_output_piles_up_and_leaves_as_one_message() -> None:
    """A busy client gets all waiting output in one message, at the right position."""
    output = Output(TOKENIZER.detokenizer(), [], with_logprobs=False)
    output.feed([70])
    first = output.take()
    output.feed([71, 72])
    output.feed([73])
    second = output.take()
    assert first is not None and second is not None
    assert (list(first.ids), first.position) == ([70], 0)
    assert (list(second.ids), second.position) == ([71, 72, 73], 1)
    assert output.taken == output.end == 4


def test_alternatives_leave_beside_their_ids() -> None:
    """Also where a stop string cuts the tokens. Id -1 stands for one that the engine did not report."""
    ids = TOKENIZER.encode("alpha STOP beta")
    output = Output(TOKENIZER.detokenizer(), ["STOP"], with_logprobs=False, with_alternatives=True)
    pairs = [[each, -1] for each in ids]
    used = output.feed(ids, (), b"".join(frames.pack_alternatives(each, (-0.5, -1.0)) for each in pairs))
    tokens = output.take()
    assert tokens is not None
    assert [list(each.ids) for each in tokens.top_logprobs] == [[each] for each in ids[:used]]
    assert all(list(each.logprobs) == [-0.5] for each in tokens.top_logprobs)
    plain = Output(TOKENIZER.detokenizer(), [], with_logprobs=False, with_alternatives=True)
    plain.feed(ids[:2])
    tokens = plain.take()
    assert tokens is not None and [list(each.ids) for each in tokens.top_logprobs] == [[], []]


def all_text(output: Output) -> str:
    """Return the waiting text, message by message; text released only at the end has its own message."""
    messages = iter(output.take, None)
    return "".join(message.text for message in messages)


@example("z", 0)
@given(texts, st.integers(0, 100))
def test_a_stream_taken_over_goes_on_in_the_middle_of_a_character(text: str, cut: int) -> None:
    """The texts of two frontends, before and after a takeover, join to the whole text."""
    ids = TOKENIZER.encode(text)
    cut = min(cut, len(ids))
    first = Output(TOKENIZER.detokenizer(), ["zzz", "\n\n"], with_logprobs=False)
    second = Output(TOKENIZER.detokenizer(), ["zzz", "\n\n"], with_logprobs=False)
    first.feed(ids[:cut])
    sent = all_text(first)
    second.feed(ids[:cut])
    second.forget_waiting()
    if second.stop_string is None:
        second.feed(ids[cut:])
    if second.stop_string is None:
        second.flush()
    assert sent + all_text(second) == naive_stop(text, ["zzz", "\n\n"])[0]
