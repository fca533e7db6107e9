"""Stop texts are found across any split into tokens, and nothing of them is given out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpager.engine import StopFinder

letters = st.text("ab", max_size=12)


@given(st.lists(letters, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stream_equals_a_search_after_every_piece(pieces: list[str], stop: list[str]) -> None:
    finder = StopFinder(stop)
    given_out = "".join(finder.push(piece) for piece in pieces)
    text, expected = "", None
    for piece in pieces:
        text += piece
        if any(word in text for word in stop):
            expected = text[: min(text.find(word) for word in stop if word in text)]
            break
    if expected is None:
        assert finder.found is None
        assert given_out + finder.finish() == text
    else:
        assert finder.found in stop
        assert given_out == expected


@given(st.lists(letters, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop_text(pieces: list[str], stop: list[str]) -> None:
    finder = StopFinder(stop)
    sent = ""
    for end, piece in enumerate(pieces, 1):
        sent += finder.push(piece)
        if finder.found is not None:
            return
        held = "".join(pieces[:end])[len(sent) :]
        assert held == "" or any(word.startswith(held) for word in stop)


def test_nothing_is_given_out_after_a_stop_text() -> None:
    finder = StopFinder(("b",))
    assert [finder.push(piece) for piece in ("a", "cbd", "e", "b")] == ["a", "c", "", ""]
    assert finder.found == "b"
