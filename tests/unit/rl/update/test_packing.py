"""Packing: the layout of trees, what each token sees, and which place predicts what."""

import random

import numpy as np
import pytest

from memagent.errors import ConfigError
from memagent.rl.types import Sample
from memagent.rl.update.packing import Pack, num_row_tokens, pack, share_out
from memagent.rl.update.rows import TrainingRow


def row(text: str, *, group: int = 0, rollout: int = 0, advantage: float = 1.0) -> TrainingRow:
    """A row of letters; capitals are given, small letters are sampled."""
    return TrainingRow(
        sample=Sample(
            ids=tuple(map(ord, text)),
            is_sampled=tuple(letter.islower() for letter in text),
            logprobs=tuple(
                -float(place) if letter.islower() else 0.0 for place, letter in enumerate(text)
            ),
        ),
        group=group,
        rollout=rollout,
        advantage=advantage,
        weight=0.5,
    )


def letters(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


def seen(one: Pack, query: int) -> str:
    """The tokens that a query sees, by the rule."""
    keys = [k for k in range(one.num_tokens) if k <= query < one.until[k]]
    return letters(one.ids[keys])


def predictions(one: Pack) -> list[tuple[int, str, int, int]]:
    """(place, target, row, offset) of each target."""
    targets = one.targets
    return [
        (int(place), chr(token), int(number), int(offset))
        for place, token, number, offset in zip(
            targets.places, targets.ids, targets.rows, targets.offsets, strict=True
        )
    ]


def test_a_shared_prefix_is_laid_out_once() -> None:
    (one,) = pack([row("ABCde"), row("ABCfgh")], max_tokens=100)
    assert letters(one.ids) == "ABCdefgh"
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    assert one.until.tolist() == [8, 8, 8, 5, 5, 8, 8, 8]
    assert [seen(one, query) for query in (2, 4, 7)] == ["ABC", "ABCde", "ABCfgh"]


def test_the_last_shared_token_predicts_the_first_of_each_suffix() -> None:
    (one,) = pack([row("ABCde"), row("ABCfgh")], max_tokens=100)
    assert predictions(one) == [
        (2, "d", 0, 3),
        (2, "f", 1, 3),
        (3, "e", 0, 4),
        (5, "g", 1, 4),
        (6, "h", 1, 5),
    ]
    assert one.targets.behaviour.tolist() == [-3.0, -3.0, -4.0, -4.0, -5.0]


def test_targets_keep_the_values_of_their_own_row() -> None:
    rows = [row("ABxy", advantage=2.0), row("ABxz", advantage=-1.0)]
    (one,) = pack(rows, max_tokens=100)
    # both sampled x after AB: one token in the tree, two targets
    assert letters(one.ids) == "ABxyz"
    assert predictions(one)[:2] == [(1, "x", 0, 2), (1, "x", 1, 2)]
    assert one.targets.advantages.tolist() == [2.0, -1.0, 2.0, -1.0]
    assert one.targets.weights.tolist() == [0.5] * 4


def test_rows_that_branch_several_times_are_one_tree() -> None:
    rows = [row("AABBaa"), row("AABBab"), row("AACC"), row("AACCcDDd"), row("AACCcDDe")]
    (one,) = pack(rows, max_tokens=100)
    assert letters(one.ids) == "AABBaabCCcDDde"
    ends = {"AABBaa", "AABBab", "AACCcDDd", "AACCcDDe"}
    assert {seen(one, query) for query in (5, 6, 12, 13)} == ends
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 5, 5, 2, 3, 4, 5, 6, 7, 7]


def test_equal_rows_are_laid_out_once_with_all_their_targets() -> None:
    (one,) = pack([row("Aab"), row("Aab")], max_tokens=100)
    assert letters(one.ids) == "Aab"
    assert [target[2] for target in predictions(one)] == [0, 1, 0, 1]


def test_rows_of_different_groups_are_not_shared() -> None:
    (one,) = pack([row("ABCa", group=0), row("ABCb", group=1)], max_tokens=100)
    assert letters(one.ids) == "ABCaABCb"
    assert seen(one, 7) == "ABCb"


def test_branches_of_branches_share_their_own_prefix() -> None:
    rows = [row("ABCDEFx"), row("ABCDEFy"), row("ABCDGz"), row("ABCDHw")]
    (one,) = pack(rows, max_tokens=100)
    assert letters(one.ids) == "ABCDEFxyGzHw"


def test_without_sharing_every_row_stands_alone() -> None:
    (one,) = pack([row("ABCde"), row("ABCfgh")], max_tokens=100, share=False)
    assert letters(one.ids) == "ABCfghABCde"  # the longest first
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert seen(one, 10) == "ABCde"


def test_a_tree_too_long_is_cut_where_rows_share_least() -> None:
    # A, then BBBB with two suffixes and CCCC with two: 1 + 2 x (4 + 2 x 2) = 17 tokens
    rows = [row("ABBBBaa"), row("ABBBBbb"), row("ACCCCaa"), row("ACCCCbb")]
    packs = pack(rows, max_tokens=10)
    assert [letters(one.ids) for one in packs] == ["ABBBBaabb", "ACCCCaabb"]


def test_a_flat_tree_too_long_is_cut_into_parts_that_still_share() -> None:
    # 6 shared and 5 suffixes of 2: 16 tokens; 12 hold the prefix and three suffixes
    rows = [row("ABCDEF" + letter * 2) for letter in "abcde"]
    packs = pack(rows, max_tokens=12)
    assert [letters(one.ids) for one in packs] == ["ABCDEFaabbcc", "ABCDEFddee"]


def test_packs_are_filled_by_the_longest_that_fits_first() -> None:
    rows = [
        row(letter * length, group=n)
        for n, (letter, length) in enumerate(zip("ABCDE", (2, 5, 4, 3, 6), strict=True))
    ]
    packs = pack(rows, max_tokens=10)
    # 6 + 4, then 5 + 3 + 2
    assert [letters(one.ids) for one in packs] == ["EEEEEECCCC", "BBBBBDDDAA"]


def test_a_row_longer_than_a_pack_is_refused_with_its_length() -> None:
    with pytest.raises(
        ConfigError, match="a row has 6 tokens, more than the 5 of a packed sequence"
    ):
        pack([row("ABCdef")], max_tokens=5)


def test_no_rows_give_no_packs() -> None:
    assert pack([], max_tokens=10) == []


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_every_target_sees_exactly_its_own_row(seed: int, share: bool) -> None:
    rng = random.Random(seed)
    rows: list[TrainingRow] = []
    for number in range(rng.randint(1, 30)):
        base = (
            letters(np.array(rng.choice(rows).sample.ids)) if rows and rng.random() < 0.8 else "A"
        )
        kept = base[: rng.randint(1, len(base))]
        text = kept + "".join(rng.choices("ABab", k=rng.randint(1, 8)))
        rows.append(row(text, group=rng.randint(0, 2), rollout=number))
    longest = max(len(one.sample.ids) for one in rows)
    max_tokens = longest + rng.randint(0, 20)
    packs = pack(rows, max_tokens=max_tokens, share=share)
    found = []
    for one in packs:
        assert one.num_tokens <= max_tokens
        for place, token, number, offset in predictions(one):
            ids = rows[number].sample.ids
            assert seen(one, place) == letters(np.array(ids[:offset]))
            assert one.positions[place] == offset - 1
            assert ord(token) == ids[offset]
            found.append((number, offset))
    expected = [
        (number, offset)
        for number, one in enumerate(rows)
        for offset, sampled in enumerate(one.sample.is_sampled)
        if sampled
    ]
    assert sorted(found) == expected
    total = sum(one.num_tokens for one in packs)
    assert total <= num_row_tokens(rows) if share else total == num_row_tokens(rows)


def test_processes_get_as_many_packs_and_about_as_many_tokens() -> None:
    rows = [row("A" * (length - 1) + "a", group=length) for length in (9, 8, 7, 6, 5)]
    parts = share_out(pack(rows, max_tokens=9), 2)
    assert [[one.num_tokens for one in part] for part in parts] == [[9, 6, 5], [8, 7, 1]]
    assert len(parts[1][2].targets) == 0
