"""Places for requests, and who gets one."""

from __future__ import annotations

import pytest

from memagent.serve.errors import ApiError
from memagent.serve.guard import Gate


def test_a_place_is_free_again_after_use() -> None:
    gate = Gate(1)
    for _ in range(3):
        with gate.place():
            assert gate.num_active == 1
    assert gate.num_active == 0


def test_a_place_is_free_again_after_a_failure() -> None:
    gate = Gate(1)
    with pytest.raises(ValueError, match="bug"), gate.place():
        raise ValueError("bug")
    assert gate.num_active == 0


def test_one_too_many_is_told_to_come_back() -> None:
    gate = Gate(1)
    with gate.place(), pytest.raises(ApiError) as caught, gate.place():
        pass
    assert caught.value.status == 429
    assert caught.value.response().headers["Retry-After"] == "1"


def test_a_draining_server_takes_nothing_new() -> None:
    gate = Gate(5)
    gate.is_draining = True
    with pytest.raises(ApiError) as caught, gate.place():
        pass
    assert caught.value.status == 503
    assert caught.value.body()["error"]["type"] == "server_error"
