"""Files of strangers: a time limit ends what it should, and only that."""

import time

import pytest

from memagent.errors import ConfigError
from memagent.foreign import foreign_file


def test_what_is_cleaned_up_when_the_time_is_up_is_not_stopped_too() -> None:
    cleaned: list[str] = []

    def read() -> None:
        with foreign_file("book", "cannot be read", seconds=0.05, is_processor_time=True):
            try:
                while True:
                    pass
            finally:
                time.sleep(0.6)  # frees what was built, which takes its time
                cleaned.append("book")

    with pytest.raises(ConfigError, match=r"book cannot be read: more than 0\.05 seconds"):
        read()
    assert cleaned == ["book"]
