"""Admission of requests."""

import pytest

from memagent.serve.guard import AdmissionGate
from memagent.serve.wire import ApiError


def test_a_place_is_free_again_after_use() -> None:
    gate = AdmissionGate(1)
    for _ in range(3):
        with gate.admit():
            assert gate.num_active == 1
    assert gate.num_active == 0


def test_a_place_is_free_again_after_a_failure() -> None:
    gate = AdmissionGate(1)
    with pytest.raises(ValueError, match="bug"), gate.admit():
        raise ValueError("bug")
    assert gate.num_active == 0


def test_a_request_above_the_limit_gets_429_with_retry_after() -> None:
    gate = AdmissionGate(1)
    with gate.admit(), pytest.raises(ApiError) as caught, gate.admit():
        pass
    assert caught.value.status == 429
    assert caught.value.response().headers["Retry-After"] == "1"


def test_a_draining_server_refuses_new_requests() -> None:
    gate = AdmissionGate(5)
    gate.is_draining = True
    with pytest.raises(ApiError) as caught, gate.admit():
        pass
    assert caught.value.status == 503
    assert caught.value.body()["error"]["type"] == "server_error"
