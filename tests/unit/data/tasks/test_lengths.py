"""Texts of a requested length: at most the target, at least 98 % of it, with few counts."""

import random
from collections.abc import Callable

import pytest

from memagent.data.tasks.lengths import Fitted, fit, length_tokenizer
from memagent.errors import ConfigError
from memagent.tokens.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from tests.conftest import prose


class Watched(ByteTokenizer):
    """Counts bytes and remembers how long the texts were."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    def count(self, text: str) -> int:
        self.counted.append(len(text))
        return super().count(text)


def repeated(unit: str) -> Callable[[int], str]:
    return lambda count: unit * count


@pytest.mark.parametrize("target", [64, 1000, 4096, 50_000])
@pytest.mark.parametrize("unit", ["a", "tick tock ", "Nobody knows why. "])
def test_a_text_is_at_most_the_target_and_at_least_98_percent(
    unit: str, target: int, small_tokenizer: HuggingFaceTokenizer
) -> None:
    for tokenizer in (ByteTokenizer(), small_tokenizer):
        smallest = tokenizer.count(unit * 50) / 50
        if smallest > 0.02 * target:
            continue
        fitted = fit(repeated(unit), target, tokenizer)
        assert fitted.text == unit * fitted.num_units
        assert fitted.num_tokens == tokenizer.count(fitted.text)
        assert 0.98 * target <= fitted.num_tokens <= target


def test_uneven_units_are_met_too() -> None:
    source = random.Random(1)
    pieces = [prose(1, seed=number) * source.randint(1, 3) for number in range(4000)]
    for target in (20_000, 31_415, 100_000):
        fitted = fit(lambda count: "".join(pieces[:count]), target, ByteTokenizer())
        assert 0.98 * target <= fitted.num_tokens <= target


@pytest.mark.parametrize("power", [0.5, 1.5, 2.0])
def test_a_text_that_grows_along_a_curve_is_met(power: float) -> None:
    fitted = fit(lambda count: "x" * int(count**power), 100_000, ByteTokenizer())
    assert 98_000 <= fitted.num_tokens <= 100_000


def test_millions_of_tokens_take_one_full_count() -> None:
    tokenizer = Watched()
    fitted = fit(repeated("The road is long. "), 4_000_000, tokenizer)
    assert 3_920_000 <= fitted.num_tokens <= 4_000_000
    assert sum(tokenizer.counted) < 1.1 * 4_000_000


def test_a_text_that_changes_its_character_takes_two() -> None:
    tokenizer = Watched()

    def make(count: int) -> str:
        return "shorter " * min(count, 20_000) + "longer now " * max(0, count - 20_000)

    fitted = fit(make, 4_000_000, tokenizer)
    assert 3_920_000 <= fitted.num_tokens <= 4_000_000
    assert len([length for length in tokenizer.counted if length > 1_000_000]) == 2


def test_too_short_a_target_names_what_is_needed() -> None:
    message = "tokens=100 is too short: the list has 120 at least; raise `tokens`"
    with pytest.raises(ConfigError, match=message):
        fit(lambda n: "x" * (100 + n), 100, ByteTokenizer(), least_units=20, what="the list")


def test_units_that_are_too_coarse_are_refused_or_given_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"within 2 %: the text has 900 or 1200; raise `tokens`"):
        fit(repeated("x" * 300), 1000, ByteTokenizer())
    assert fit(repeated("x" * 300), 1000, ByteTokenizer(), is_coarse=True) == Fitted(
        3, "x" * 900, 900
    )


def test_least_units_may_be_the_answer() -> None:
    assert fit(repeated("x" * 99), 100, ByteTokenizer(), least_units=1).num_units == 1


def test_tokenizers_open_by_name_and_stay_open(tokenizer_folder: object) -> None:
    assert length_tokenizer("bytes").count("four") == 4
    assert length_tokenizer(str(tokenizer_folder)) is length_tokenizer(str(tokenizer_folder))


def test_a_model_that_was_not_pulled_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="run `memagent models pull smollm2-135m`"):
        length_tokenizer("smollm2-135m")
