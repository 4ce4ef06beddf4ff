"""Plans reproduce runs that were measured, and what they propose fits."""

import pytest

from memagent.errors import ConfigError
from memagent.rl.plan import (
    ACCELERATORS,
    Layout,
    PlanAssumptions,
    PlannedCall,
    Planner,
    Workload,
    find_accelerator,
    find_problems,
    layout_of,
    make_plan,
    remedies,
    resized,
)
from memagent.rl.settings import read_config
from memagent.rl.sizes import GIB, SHAPES, cache_bytes

DAY = 86400.0


def colocated(num_gpus: int) -> Layout:
    return Layout(num_trainers=num_gpus, num_replicas=num_gpus)


def planner_of(
    name: str, *changes: str, gpu: str = "H200", layout: Layout | None = None, **assumed: float
) -> Planner:
    config = read_config(name, changes=changes)
    given = PlanAssumptions.model_validate(assumed)
    return Planner(config, find_accelerator(gpu), given, layout)


# --- runs that were measured ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least", "most"), [("paper_7b", 3.5 / 1.5, 3.5 * 1.5), ("paper_14b", 1 / 1.5, 1.5)]
)
def test_the_papers_runs_take_as_many_days_within_a_factor_of_1_5(
    name: str, least: float, most: float
) -> None:
    # 3 to 4 days on 32 GPUs, and one on 128. The paper names no GPU: H100, memories of 256 tokens; 400 steps of
    # 128 prompts for 7B, 200 of 256 for 14B
    planner = planner_of(name, gpu="H100")
    assert least < planner.config.steps * planner.plan().step_seconds / DAY < most


@pytest.mark.parametrize(
    ("reply", "signal", "rollout", "update", "step"),
    [(66, 0.65, 9.4, 6.7, 16.1), (131, 0.75, 15.1, 9.3, 24.4)],
    ids=["steps 9 to 11", "step 30"],
)
def test_a_measured_step_of_1_5b_is_met_within_a_quarter(
    reply: float, signal: float, rollout: float, update: float, step: float
) -> None:
    # docs/experiments/reader_1.5b_keep: texts of 8,800 tokens on average, 5.3 sections
    planned = planner_of(
        "reader_1.5b/rl",
        "rollout.prompts=24",
        "update.updates=1",
        text_tokens=8800,
        reply_tokens=reply,
        signal=signal,
    ).plan()
    assert planned.step_seconds == pytest.approx(step, rel=0.25)
    assert planned.rollout_seconds == pytest.approx(rollout, rel=0.25)
    assert planned.update_seconds == pytest.approx(update, rel=0.25)


def test_a_measured_step_of_135m_is_met_within_a_quarter() -> None:
    # docs/experiments/smollm2_reader, with the adapter not merged
    planner = planner_of("smollm2_reader", "rollout.merged=false", reply_tokens=40, signal=0.4)
    assert planner.plan().step_seconds == pytest.approx(6.7, rel=0.25)
    assert planner.plan().rollout_seconds == pytest.approx(5.9, rel=0.25)


def test_the_benchmark_of_an_update_of_135m_is_met_within_a_quarter() -> None:
    # benchmarks/rl_step: 16 x 16 rollouts of one call, all weights; an update takes 1.08 s
    changes = ("update.checkpointing=false", "update.max_tokens=32768", "cluster.address=none")
    planner = planner_of("paper_7b", "model.source=smollm2-135m", *changes)
    work = Workload(prompts=16, group_size=16, calls=(PlannedCall(5000, 150, 150, 150),))
    assert work.computed_tokens == 156_800
    assert planner.update_seconds(work, updates=1) == pytest.approx(1.08, rel=0.25)


def test_the_longest_rollout_is_longer_in_a_larger_batch_and_within_the_limits() -> None:
    calls = (PlannedCall(100, 10, 100, 400),) * 4
    small, large = (
        Workload(prompts=prompts, group_size=8, calls=calls).longest_rollout for prompts in (1, 64)
    )
    assert 400 < small < large <= 1600


def test_staleness_pays_where_training_and_rollouts_take_as_long() -> None:
    changes = ("rollout.prompts=512",)
    waiting, flowing = (
        planner_of("reader_1.5b/rl", *changes, text_tokens=8800, layout=layout).plan()
        for layout in (
            Layout(num_trainers=8, num_replicas=64, is_colocated=False),
            Layout(num_trainers=8, num_replicas=64, is_colocated=False, max_staleness=2),
        )
    )
    assert flowing.step_seconds < waiting.step_seconds / 1.5
    assert flowing.step_seconds > max(flowing.update_seconds, flowing.rollout_seconds)


# --- memory ---------------------------------------------------------------------------------------


def test_all_weights_of_7b_take_152_gb_with_their_optimizer_and_reference() -> None:
    memory = planner_of("paper_7b", layout=colocated(1)).trainer
    assert (memory.resident - memory.overhead) / 1e9 == pytest.approx(152, rel=0.01)


def test_ranks_share_everything_but_activations() -> None:
    one, eight = (planner_of("paper_7b", layout=colocated(num)).trainer for num in (1, 8))
    assert eight.moments == pytest.approx(one.moments / 8)
    assert eight.weights == pytest.approx(one.weights / 8)
    assert eight.activations == one.activations
    assert eight.gathered > one.gathered == 0


def test_activations_are_those_that_were_measured_at_135m_and_1_5b() -> None:
    small = planner_of("smollm2_reader", "update.max_tokens=32768")
    assert small.trainer.activations / GIB == pytest.approx(19, rel=0.1)
    more, less = (
        planner_of("reader_1.5b/rl", f"update.max_tokens={tokens}", text_tokens=8800).trainer
        for tokens in (32768, 16384)
    )
    assert (more.training - less.training) / GIB == pytest.approx(23, rel=0.15)


def test_the_cache_is_what_the_engine_takes_and_no_larger_than_needed() -> None:
    tight = planner_of("reader_1.5b/rl", "rollout.prompts=4096", text_tokens=8800)
    free = tight.gpu.gib * GIB * 0.95 - tight.trainer.resident - SHAPES["qwen2.5-1.5b"].weight_bytes
    assert tight.engine.cache == pytest.approx(cache_bytes(free))
    roomy = planner_of("smollm2_reader")
    assert roomy.max_rows == roomy.work.num_rollouts


# --- what fits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "gpu", "layout"),
    [
        ("paper_7b", (), "H200", colocated(1)),
        ("paper_7b", (), "A100", colocated(2)),
        ("paper_7b", ("update.checkpointing=false",), "H100", colocated(8)),
        ("paper_7b", ("update.max_tokens=4096",), "H100", colocated(32)),
        ("reader_1.5b/rl", (), "RTX4090", colocated(1)),
    ],
)
def test_what_does_not_fit_fits_after_the_change_that_is_proposed(
    name: str, changes: tuple[str, ...], gpu: str, layout: Layout
) -> None:
    planner = planner_of(name, *changes, gpu=gpu, layout=layout, text_tokens=28000)
    problems = find_problems(planner)
    assert problems
    for one in problems:
        assert one.needs > one.has
        assert one.changes
        is_placed = any(change.startswith("cluster.trainer") for change in one.changes)
        changed = planner.changed(one.changes)
        if is_placed:
            changed = planner.changed(one.changes, layout_of(changed.config))
        assert one.place not in [place for place, _, _ in changed.misfits()]


def test_shorter_packs_are_proposed_before_checkpointing_and_that_before_more_gpus() -> None:
    planner = planner_of("paper_7b", "update.checkpointing=false", gpu="H100", layout=colocated(8))
    assert find_problems(planner)[0].changes == ("update.max_tokens=8192",)
    names = [change[0].partition("=")[0] for change in remedies(planner, "trainer")]
    order = [
        "update.max_tokens",
        "update.checkpointing",
        "cluster.trainer_ranks",
        "model.lora_rank",
    ]
    assert sorted(order, key=names.index) == order


def test_every_layout_that_is_proposed_can_be_trained() -> None:
    planner = planner_of("paper_7b", gpu="RTX4090", layout=colocated(4))
    for place in ("trainer", "engine"):
        for changes in remedies(planner, place):
            planner.changed(changes)


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nodes", "prompts"), [("paper_7b", 4, 128), ("paper_14b", 16, 256)]
)
def test_the_papers_configs_train_all_weights_on_its_nodes(
    name: str, nodes: int, prompts: int
) -> None:
    config = read_config(name)
    assert layout_of(config) == colocated(8 * nodes)
    assert (config.rollout.prompts, config.rollout.group_size) == (prompts, 16)
    assert config.agent.settings["prompts"] == "paper"
    assert not config.has_adapter
    assert find_problems(planner_of(name, gpu="H100")) == []


def test_the_layout_of_a_config_is_that_of_its_cluster() -> None:
    assert layout_of(read_config("smollm2_reader")).is_single
    assert resized(layout_of(read_config("paper_7b")), 8) == colocated(8)
    changes = [
        "cluster.placement=separate",
        "cluster.trainer_ranks=24",
        "cluster.engine_replicas=4",
        "cluster.tensor_parallel_size=2",
        "rollout.engine=vllm:Qwen2.5-7B-Instruct",
        "objective.max_staleness=3",
        "rollout.asynchronous=true",
        "model.lora_rank=16",
    ]
    separate = layout_of(read_config("paper_7b", changes=changes))
    assert (separate.num_gpus, separate.max_staleness) == (32, 3)
    fewer = resized(separate, 8)
    assert (fewer.num_trainers, fewer.num_replicas, fewer.num_gpus) == (6, 1, 8)
    with pytest.raises(ConfigError, match="too few for a trainer and an engine of 2"):
        resized(separate, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["cluster.tensor_parallel_size=2"], "embedded engine replicas have one GPU each"),
        (
            ["cluster.tensor_parallel_size=2", "rollout.engine=vllm:M"],
            "colocated engine replicas have one GPU each",
        ),
    ],
)
def test_a_layout_that_training_refuses_is_not_planned(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config("paper_7b", changes=["cluster.engine_replicas=16", *changes])


# --- the whole ------------------------------------------------------------------------------------


def test_a_plan_of_all_adds_up() -> None:
    plan = make_plan(read_config("smollm2_reader"), gpu="H100", price=2.0)
    parts = (plan.warm_start_seconds, plan.validation_seconds, plan.checkpoint_seconds)
    assert plan.run_seconds == pytest.approx(50 * plan.chosen.step_seconds + sum(parts))
    assert plan.cost == pytest.approx(2.0 * plan.run_seconds / 3600)
    assert all(part > 0 for part in parts)
    assert plan.workload.num_calls == 16 * 16 * 6
    assert plan.as_json()["cost"] == plan.cost


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="steps=0"):
        make_plan(read_config("tiny_cpu", changes=["steps=0"]))
    with pytest.raises(ConfigError, match="did you mean H200"):
        find_accelerator("H2000")
    with pytest.raises(ConfigError, match="sections, and at most 100,000 can be planned"):
        planner_of("tiny_cpu", text_tokens=10**9)
    assert find_accelerator("h100") is ACCELERATORS["H100"]
