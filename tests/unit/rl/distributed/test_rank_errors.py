"""What the errors of several ranks say together."""

from ray.exceptions import ActorDiedError, RayTaskError

from memagent.errors import ConfigError
from memagent.rl.backend import RanksLost
from memagent.rl.distributed.ranks import worst_of


def failed(cause: Exception) -> RayTaskError:
    return RayTaskError("update", "a traceback", cause)


def test_a_rank_that_ended_explains_what_the_others_report() -> None:
    noticed = failed(RuntimeError("[gloo] Connection closed by peer"))
    found = worst_of([noticed, ActorDiedError()], num_ranks=2)
    assert isinstance(found, RanksLost)
    assert str(found) == "one of 2 trainer ranks has ended"


def test_an_error_for_the_user_comes_before_what_it_causes_elsewhere() -> None:
    error = ConfigError("lower `update.max_tokens`")
    waiting = failed(RuntimeError("NCCL timeout"))
    assert worst_of([waiting, failed(error)], num_ranks=2) is error


def test_ranks_that_lost_each_other_can_be_restarted() -> None:
    found = worst_of([failed(RuntimeError("[gloo] Timed out waiting 1800000ms"))], num_ranks=4)
    assert isinstance(found, RanksLost)


def test_ranks_are_restarted_where_a_gpu_has_failed() -> None:
    broken = failed(RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with"))
    waiting = failed(RuntimeError("[gloo] Connection closed by peer"))
    found = worst_of([waiting, broken], num_ranks=2)
    assert isinstance(found, RanksLost)
    assert str(found) == (
        "a GPU of 2 trainer ranks has failed (CUDA error: uncorrectable ECC error encountered)"
    )


def test_a_bug_keeps_its_error() -> None:
    bug = KeyError("lr")
    assert worst_of([failed(bug)], num_ranks=2) is bug
