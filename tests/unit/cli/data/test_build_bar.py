"""How far a dataset that is being built has come."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from memagent.cli.data.build import BuildBar
from memagent.data.build import BuildJob, BuildProgress


def details(*moments: tuple[float, int], num_resumed: int = 0) -> list[str]:
    """What is shown of the time left, at each time with so many of 50 examples done."""
    shown: list[str] = []
    frame = SimpleNamespace(
        seconds=0.0,
        print=lambda text: None,
        show=lambda headline, *, detail, **_: shown.append(detail),
    )
    bar = BuildBar(cast(Any, frame))
    job = cast(BuildJob, SimpleNamespace(out=Path("train.jsonl")))
    for frame.seconds, num_done in moments:
        bar(job, BuildProgress(num_done=num_done, num_total=50, num_resumed=num_resumed))
    return shown


def test_the_time_left_does_not_count_the_start_of_the_workers() -> None:
    assert details((0, 0), (15, 1), (16, 6), (17, 11)) == ["", "", "9 s left", "8 s left"]


def test_examples_of_an_earlier_build_are_not_counted() -> None:
    assert details((0, 40), (5, 41), (7, 43), num_resumed=40) == ["", "", "7 s left"]
