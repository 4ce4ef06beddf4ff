"""Evaluation, `data build` and `data filter` on a cluster of two nodes: records and bytes of one machine."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memagent.cluster import Cluster, node_ids, open_cluster
from memagent.cluster_workers import ClusterExecutor
from memagent.data.build import BuildJob, build
from memagent.data.example import Example, Passage
from memagent.data.formats.files import write_examples
from memagent.engines.base import EngineChoice, choose_engine
from memagent.engines.replicas import ReplicatedEngine, open_replicas
from memagent.errors import ClusterError, ConfigError, DataError
from memagent.eval.select import filter_dataset
from memagent.eval.setup import make_request, open_evaluation
from memagent.eval.suites import Suite
from memagent.types import Sampling
from tests.integration.test_eval import records_of
from tests.support.ray_nodes import ray_nodes
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.cluster
SCRIPTED = choose_engine("scripted", {})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes(2), open_cluster("auto", wait_seconds=120) as joined:
        yield joined


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> EngineChoice:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")
    return choose_engine(f"local:{folder}", {"device": "cpu"})


# --- building -------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_dataset_built_on_the_cluster_has_the_bytes_of_one_machine(
    cluster: Cluster, tmp_path: Path
) -> None:
    def job(folder: str) -> BuildJob:
        out = tmp_path / folder / "data.jsonl"
        settings = {"tokens": 2000, "tokenizer": "bytes"}
        return BuildJob(task="ruler/vt", settings=settings, num=12, out=out)

    build(job("here"))
    build(
        job("there"), processes=3, open_pool=lambda num, **how: ClusterExecutor(cluster, num, **how)
    )
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")


def worker_node(number: int) -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def fail(number: int) -> None:
    raise DataError(f"example {number} cannot be built")


def test_workers_are_on_all_nodes_and_errors_are_those_of_the_function(cluster: Cluster) -> None:
    pool = ClusterExecutor(cluster, 4)
    try:
        nodes, end = set[str](), time.monotonic() + 60
        while nodes != set(node_ids()):  # a worker gets work when it has started
            assert time.monotonic() < end
            asked = [pool.submit(worker_node, number) for number in range(8)]
            nodes |= {one.result(60) for one in asked}
        with pytest.raises(DataError, match="example 7 cannot be built"):
            pool.submit(fail, 7).result(60)
    finally:
        pool.shutdown()


def end_once(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        os._exit(1)
    return "done"


def test_a_worker_that_dies_is_started_again(cluster: Cluster, tmp_path: Path) -> None:
    pool = ClusterExecutor(cluster, 1)
    try:
        assert pool.submit(end_once, str(tmp_path / "died")).result(60) == "done"
    finally:
        pool.shutdown()


def end_always() -> None:
    os._exit(1)


def test_a_function_that_ends_its_workers_is_an_error_and_the_others_go_on(
    cluster: Cluster,
) -> None:
    pool = ClusterExecutor(cluster, 2)
    try:
        ending = pool.submit(end_always)
        assert pool.submit(abs, -3).result(60) == 3
        with pytest.raises(ClusterError, match="4 workers died at one function"):
            ending.result(120)
    finally:
        pool.shutdown()


def test_workers_without_room_get_nothing_to_do(cluster: Cluster) -> None:
    pool = ClusterExecutor(cluster, 99)
    try:
        asked = [pool.submit(abs, -number) for number in range(200)]
        assert [one.result(60) for one in asked] == list(range(200))
    finally:
        pool.shutdown()


def refuse(name: str) -> None:
    raise DataError(f"{name} is not on this node")


def test_what_a_worker_cannot_open_is_the_error_of_what_was_submitted(cluster: Cluster) -> None:
    pool = ClusterExecutor(cluster, 2, initializer=refuse, initargs=("facts.txt",))
    try:
        with pytest.raises(DataError, match=r"^facts.txt is not on this node$"):
            pool.submit(abs, -3).result(60)
    finally:
        pool.shutdown()


def test_without_room_for_any_worker_there_is_one_line_in_time(cluster: Cluster) -> None:
    hasty = Cluster(wait_seconds=2, on_note=lambda text: None, is_local=False)
    with reserved_cpus(int(cluster.total("CPU"))):
        pool = ClusterExecutor(hasty, 3)
        try:
            message = r"3 workers need 3 CPU; free .* lower `processes`; waited 2 s"
            with pytest.raises(ClusterError, match=message):
                pool.submit(abs, -3).result(60)
        finally:
            pool.shutdown()


@contextmanager
def reserved_cpus(num: int) -> Iterator[None]:
    """All CPUs of the cluster are in use."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 1.0}] * num, strategy="SPREAD")
    assert group.wait(60)
    yield
    remove_placement_group(group)


# --- engines --------------------------------------------------------------------------------------


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    made = [
        Example(
            id=f"e{number}",
            task="boxes",
            question=f"What is the code of box {number}?",
            answers=("The code",) if number % 3 == 0 else (f"code-{number}",),
            documents=(Passage(text=f"The code of box {number} is code-{number}. " * 8),),
        )
        for number in range(9)
    ]
    path = tmp_path / "boxes.jsonl"
    write_examples(path, made)
    return path


async def evaluated(
    examples: Path, engine: EngineChoice, run: Path, opener: Callable[..., Any] | None = None
) -> dict[str, Any]:
    suite = Suite.parse(
        {
            "tasks": [{"files": [str(examples)]}],
            "methods": [{"name": "reader"}],
            "agent": {"window": 512, "chunk_tokens": 64, "memory_tokens": 32, "answer_tokens": 16},
            "seed": 3,
        }
    )
    settings = dict(engine.settings)
    request = make_request(suite, engine.spec, engine_settings=settings)
    async with open_evaluation(request, run_dir=run, open_engine=opener) as evaluation:
        await evaluation.evaluate()
    return records_of(run)


@pytest.mark.parametrize("kind", ["scripted", "local"])
async def test_an_evaluation_on_replicas_has_the_records_of_one_machine(
    kind: str, cluster: Cluster, tiny: EngineChoice, examples: Path, tmp_path: Path
) -> None:
    engine = SCRIPTED if kind == "scripted" else tiny
    used: list[ReplicatedEngine] = []

    async def opener(choice: EngineChoice) -> ReplicatedEngine:
        used.append(await open_replicas(cluster, choice, num=2))
        return used[0]

    here = await evaluated(examples, engine, tmp_path / "here")
    there = await evaluated(examples, engine, tmp_path / "there", opener)
    assert len(here) == 9
    assert there == here
    assert used[0].num_replicas == 2


async def test_a_filtering_on_replicas_keeps_what_one_machine_keeps(
    cluster: Cluster, examples: Path, tmp_path: Path
) -> None:
    with SCRIPTED.open() as engine:
        here = await filter_dataset(examples, tmp_path / "here.jsonl", engine)
    async with await open_replicas(cluster, SCRIPTED, num=2) as replicas:
        there = await filter_dataset(examples, tmp_path / "there.jsonl", replicas)
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    assert there == here


async def test_a_replica_that_dies_is_replaced_and_no_call_is_lost(
    cluster: Cluster, tiny: EngineChoice
) -> None:
    import ray

    notes: list[str] = []
    sampling = Sampling(max_tokens=8, temperature=0.0)
    async with await open_replicas(cluster, tiny, num=2, on_note=notes.append) as engine:

        async def ask(number: int) -> str:
            message = {"role": "user", "content": f"box {number} " * 20}
            return (await engine.complete([message], sampling)).text  # type: ignore[list-item]

        before = [await ask(number) for number in range(4)]
        calls = [asyncio.create_task(ask(number)) for number in range(4)]
        await asyncio.sleep(0)
        ray.kill(engine.actors[0])
        assert await asyncio.gather(*calls) == before
        assert [await ask(number) for number in range(4)] == before
        for _ in range(300):
            if all(engine.actors):
                break
            await asyncio.sleep(0.1)
        assert all(engine.actors), "the replica is there again"
    assert notes[0].startswith(f"replica 0 of {tiny.spec} died (")
    assert notes[1:] == [f"replica 0 of {tiny.spec} is back"]


async def test_more_replicas_than_the_cluster_has_room_for_are_refused_in_time() -> None:
    too_many = pytest.raises(ClusterError, match=r"99 replicas of scripted need 99 CPU")
    with open_cluster("auto", wait_seconds=1.0) as small, too_many:
        await open_replicas(small, SCRIPTED, num=99)


async def test_an_engine_that_a_node_cannot_open_is_one_line(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"^replica 0 of local:/nowhere: "):
        await open_replicas(cluster, EngineChoice(spec="local:/nowhere", settings={}), num=1)
