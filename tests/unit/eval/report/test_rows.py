"""Rows of tables from records: values one can work out by hand."""

import pytest

from memagent.eval.records import ItemRecord
from memagent.eval.report.rows import (
    RULER_TEN,
    Entry,
    TextLength,
    average_interval,
    average_rows,
    compare_rows,
    format_tokens,
    holm,
    result_rows,
)
from memagent.eval.stats import Interval, bounded, wilson
from tests.support.eval_runs import failed, item

TASK = "ruler/vt"


def entries(*records: ItemRecord) -> list[Entry]:
    return [Entry(record.method, record) for record in records]


def scored(
    method: str, scores: list[float], *, tokens: int = 8192, task: str = TASK
) -> list[Entry]:
    return entries(
        *(item(task, method, tokens, index, score=score) for index, score in enumerate(scores))
    )


# --- results --------------------------------------------------------------------------------------


def test_a_failed_item_is_wrong_and_stays_in_the_denominator() -> None:
    right = [item(TASK, "reader", 8192, index) for index in range(6)]
    gone = [failed(TASK, "reader", 8192, index) for index in (6, 7)]
    [row] = result_rows(entries(*right, *gone))
    assert row.score == wilson(6, 8)
    assert (row.num_failed, row.failure_rate, row.num_samples) == (2, 0.25, 8)
    [row] = result_rows(entries(failed(TASK, "reader", 8192, 0, score=1.0)))
    assert row.score.value == 0.0  # whatever the record says


def test_equal_scores_between_0_and_1_get_an_interval_with_a_width() -> None:
    [row] = result_rows(scored("reader", [0.5, 0.5, 0.5]))
    assert row.score == bounded([0.5, 0.5, 0.5])
    assert row.score.high - row.score.low > 0.5


def test_failed_and_empty_answers_show_what_they_cost() -> None:
    right = [item(TASK, "reader", 8192, index, answer="x") for index in range(2)]
    empty = item(TASK, "reader", 8192, 2, answer=" \n", score=0.0, prompt_tokens=70)
    gone = failed(TASK, "reader", 8192, 3, prompt_tokens=30, completion_tokens=5)
    [row] = result_rows(entries(*right, empty, gone))
    assert (row.num_failed, row.num_empty, row.score.value) == (1, 1, 0.5)
    assert row.answered_score == 1.0
    assert row.lost_tokens == 70 + empty.completion_tokens + 35


def test_costs_are_means_per_answer() -> None:
    one = item(TASK, "reader", 8192, 0, prompt_tokens=100, cost=0.25, num_tokens=8000)
    other = item(
        TASK, "reader", 8192, 1, prompt_tokens=300, cost=0.75, num_tokens=8190, is_cut=True
    )
    [row] = result_rows(entries(one, other))
    assert (row.prompt_tokens, row.completion_tokens, row.num_tokens) == (200, 50, 250)
    assert (row.cost, row.seconds, row.num_calls, row.num_cut) == (0.5, 2.0, 10, 1)
    assert (row.mean_tokens, row.x) == (8095, 8192)
    [row] = result_rows(entries(item(TASK, "a", 64, 0, cost=1.0), item(TASK, "a", 64, 1)))
    assert row.cost is None  # not known for every answer


def test_samples_of_one_item_are_averaged_before_the_interval() -> None:
    samples = [
        item(TASK, "reader", 8192, 0, score=score, seed=seed)
        for seed, score in enumerate([1.0, 0.0, 1.0, 0.0])
    ]
    [row] = result_rows(entries(*samples, item(TASK, "reader", 8192, 1, score=0.5)))
    assert (row.score.value, row.score.num, row.num_samples) == (0.5, 2, 5)


def test_rows_are_by_task_then_length_then_series_as_they_came() -> None:
    rows = result_rows(
        [
            *scored("reader", [1.0], tokens=32768),
            *scored("reader", [1.0]),
            *scored("direct", [1.0]),
            *scored("direct", [1.0], task="hotpotqa"),
            *entries(item(TASK, "direct", None, 0)),
        ]
    )
    assert [(row.task, row.length.label, row.series) for row in rows] == [
        ("hotpotqa", "8K", "direct"),
        (TASK, "8K", "reader"),
        (TASK, "8K", "direct"),
        (TASK, "32K", "reader"),
        (TASK, "as given", "direct"),
    ]


@pytest.mark.parametrize(
    ("num", "label"),
    [
        (8192, "8K"),
        (917504, "896K"),
        (1835008, "1.75M"),
        (3670016, "3.5M"),
        (7000, "7k"),
        (896000, "896k"),
        (3584000, "3584k"),
        (4321, "4,321"),
        (0, "0"),
    ],
)
def test_lengths_are_labelled_in_k(num: int, label: str) -> None:
    assert format_tokens(num) == label


# --- averages -------------------------------------------------------------------------------------


def test_an_average_weighs_tasks_equally_and_adds_distances_as_variances() -> None:
    parts = [
        Interval(value=0.8, low=0.5, high=0.9, num=10),
        Interval(value=0.4, low=0.0, high=0.4, num=90),
    ]
    average = average_interval(parts)
    assert average.value == pytest.approx(0.6)
    assert average.low == pytest.approx(0.6 - 0.25)  # half of the hypotenuse of 0.3 and 0.4
    assert average.high == pytest.approx(0.6 + 0.05)
    assert average.num == 100


def test_the_average_of_tasks_that_are_all_right_keeps_a_width() -> None:
    one = wilson(20, 20)
    average = average_interval([one] * 4)
    assert (average.value, average.high) == (1.0, 1.0)
    assert average.low == pytest.approx(1 - (1 - one.low) / 2)


def test_averages_need_every_task_of_the_group_at_that_length() -> None:
    rows = result_rows(
        [
            *scored("reader", [1.0, 1.0], task="beyond/counting"),
            *scored("reader", [0.0, 1.0], task="beyond/two_hop"),
            *scored("reader", [1.0, 1.0], task="beyond/counting", tokens=32768),
            *scored("direct", [1.0, 1.0], task="beyond/counting"),
            *scored("reader", [1.0], task="hotpotqa"),
        ]
    )
    [average] = average_rows(rows)
    assert (average.series, average.group, average.length) == (
        "reader",
        "beyond",
        TextLength(tokens=8192),
    )
    assert (average.score.value, average.anchor_task) == (0.75, "beyond/average")


def test_the_average_of_ruler_is_over_the_papers_ten_tasks_where_all_are_there() -> None:
    ten = [entry for task in RULER_TEN for entry in scored("reader", [1.0], task=task)]
    extra = scored("reader", [0.0], task="ruler/cwe")
    [average] = average_rows(result_rows([*ten, *extra]))
    assert (average.tasks, average.score.value) == (RULER_TEN, 1.0)
    assert average.anchor_task == "ruler/average"
    [partial] = average_rows(result_rows([*ten[1:], *extra]))
    assert (partial.score.value, partial.anchor_task) == (0.9, None)


# --- comparisons ----------------------------------------------------------------------------------


def test_series_are_compared_on_the_items_both_have() -> None:
    ours = scored("reader", [1.0] * 8 + [0.0, 0.0])
    theirs = scored("direct", [0.0] * 6 + [1.0, 1.0])
    [row] = compare_rows([*ours, *theirs])
    assert (row.first, row.second, row.comparison.difference.num) == ("reader", "direct", 8)
    assert (row.comparison.num_better, row.comparison.num_worse) == (6, 0)
    assert row.comparison.difference.value == 0.75
    assert row.comparison.p_value == 2 / 2**6


def test_a_failed_item_is_a_loss_and_items_of_other_ids_are_not_compared() -> None:
    ours = scored("reader", [1.0])
    [row] = compare_rows([*ours, *entries(failed(TASK, "direct", 8192, 0))])
    assert (row.comparison.num_better, row.comparison.num_equal) == (1, 0)
    other = item(TASK, "direct", 8192, 0, id="of another seed")
    assert compare_rows([*ours, *entries(other)]) == []


def test_over_all_lengths_a_question_counts_once() -> None:
    both = [
        *scored("reader", [1.0, 1.0]),
        *scored("reader", [1.0, 0.0], tokens=32768),
        *scored("direct", [1.0, 0.0]),
        *scored("direct", [0.0, 0.0], tokens=32768),
    ]
    rows = compare_rows(both)
    assert [row.length and row.length.label for row in rows] == ["8K", "32K", None]
    assert rows[2].comparison.difference.num == 2
    assert rows[2].comparison.difference.value == 0.5
    assert rows[2].comparison.num_better == 2


def test_holms_correction_is_as_worked_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_p_values_of_a_table_are_corrected_for_its_size() -> None:
    ours = [*scored("a", [1.0] * 8), *scored("b", [0.0] * 8), *scored("c", [0.0] * 8)]
    rows = compare_rows(ours)
    assert [(row.first, row.second) for row in rows] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [row.comparison.p_value for row in rows] == [2 / 256, 2 / 256, 1.0]
    assert [row.p_adjusted for row in rows] == pytest.approx([6 / 256, 6 / 256, 1.0])


# --- depth ----------------------------------------------------------------------------------------


def test_scores_fall_into_the_bucket_of_their_depth() -> None:
    records = [
        item(TASK, "reader", 8192, 0, depth=0.0),
        item(TASK, "reader", 8192, 1, depth=0.1, score=0.0),
        failed(TASK, "reader", 8192, 2, depth=1.0),
        item(TASK, "reader", 8192, 3),
    ]
    [row] = result_rows(entries(*records))
    scores = [bucket.score for bucket in row.buckets]
    assert scores == [wilson(1, 2), None, None, None, wilson(0, 1)]
    assert row.num_without == 1
    assert result_rows(scored("reader", [1.0, 0.0]))[0].buckets == ()
