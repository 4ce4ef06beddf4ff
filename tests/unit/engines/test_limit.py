"""Time in a queue is measured apart from time of work."""

import asyncio

import pytest

from memagent.engines.limit import Queue, Slots

WORK = 0.05


async def call(queue: Queue, slots: Slots) -> float:
    with queue.call() as queued:
        async with slots.slot():
            await asyncio.sleep(WORK)
    return queued.seconds


async def test_the_second_of_two_items_at_one_slot_waits_as_long_as_the_first_works() -> None:
    slots, first, second = Slots(1), Queue(), Queue()
    waited = await asyncio.gather(call(first, slots), call(second, slots))
    assert (first.seconds, waited[0]) == (0.0, 0.0)
    assert second.seconds == pytest.approx(waited[1], abs=0.01)
    assert second.seconds > WORK * 0.8


async def test_a_call_that_waits_while_another_of_its_item_works_does_not_count() -> None:
    slots, queue = Slots(1), Queue()
    waited = await asyncio.gather(call(queue, slots), call(queue, slots))
    assert waited[1] > WORK * 0.8
    assert queue.seconds < WORK * 0.2


async def test_a_cancelled_wait_leaves_the_slot_to_others() -> None:
    slots, queue = Slots(1), Queue()
    async with slots.slot():
        waiting = asyncio.create_task(call(queue, slots))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert await call(Queue(), slots) == 0.0


def test_the_lowest_key_gets_the_next_slot_and_a_cancelled_call_gives_its_own_back() -> None:
    async def main() -> list[int]:
        slots, order = Slots(1), []

        async def call(key: int) -> None:
            async with slots.slot((key,)):
                order.append(key)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(call(key)) for key in (3, 1, 2)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(call(4), 5)
        return order

    assert asyncio.run(main()) == [1, 3, 4]
