"""What the loop gains by going on: rollouts during updates, rewards in other processes.

Bounds are wider than what is measured on an idle machine, 2.2 times and 13 ms: other programs may run beside the tests.
"""

from contextlib import ExitStack

import pytest

from benchmarks import async_training, process_pool

pytestmark = pytest.mark.cluster


async def test_rollouts_that_go_on_during_updates_nearly_double_the_throughput() -> None:
    first = await async_training.run(2, 0.03, None, 0.0)
    balanced = async_training.PROMPTS / first.groups_per_second * first.busy
    waiting = await async_training.run(6, 0.03, None, balanced)
    ahead = await async_training.run(6, 0.03, 2, balanced)
    assert ahead.groups_per_second > 1.6 * waiting.groups_per_second
    assert 0 < ahead.staleness_max <= 2
    assert waiting.staleness_max == 0


async def test_the_driver_answers_while_rewards_are_computed_on_the_cluster() -> None:
    with ExitStack() as stack:
        pool = process_pool.open_pool(stack, on_cluster=True)
        pool.use()
        await process_pool.many(process_pool.in_pool, pool.num_workers, 0.01)
        pooled = await process_pool.measured(process_pool.many(process_pool.in_pool, 32, 0.2))
    in_driver = await process_pool.measured(process_pool.many(process_pool.in_driver, 8, 0.2))
    assert pooled.delay(0.99) < 100
    assert pooled.delay(0.99) < in_driver.delay(0.99) / 10
    assert pooled.calls_per_second > 10 * in_driver.calls_per_second
