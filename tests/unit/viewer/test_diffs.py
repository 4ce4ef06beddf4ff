"""What changed between two memories."""

from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.viewer.traces import MAX_WORDS, num_changed, word_diff, words

texts = st.text(st.sampled_from("ab \n.é"), max_size=60) | st.text(max_size=30)


def test_words_that_differ_are_marked_and_others_are_not() -> None:
    assert word_diff("the old mill", "the new mill") == [
        ("same", "the "),
        ("gone", "old"),
        ("new", "new"),
        ("same", " mill"),
    ]


def test_the_first_memory_is_all_new() -> None:
    assert word_diff("", "Hedda inherits.") == [("new", "Hedda inherits.")]
    assert word_diff("", "") == []


@settings(max_examples=50)
@given(texts, texts)
def test_parts_join_to_both_texts(before: str, after: str) -> None:
    parts = word_diff(before, after)
    assert "".join(text for kind, text in parts if kind != "gone") == after
    assert "".join(text for kind, text in parts if kind != "new") == before
    assert all(text for _, text in parts)


def test_long_texts_are_compared_in_time_by_their_length() -> None:
    before = " ".join(f"a{number}" for number in range(MAX_WORDS))
    after = " ".join(f"b{number}" for number in range(MAX_WORDS))
    kinds = [kind for kind, _ in word_diff(f"same {before}", f"same {after}")]
    assert kinds == ["same", "gone", "new"]


def test_changed_words_are_counted_wherever_they_stand() -> None:
    assert num_changed(words("a b b c"), words("c b d d")) == (2, 2)
