"""Open an evaluation: engines, tokenizers, items, methods and the run directory.

    suite, engine ──▶ EvalRequest ──▶ open_evaluation ──▶ Evaluation ──▶ ItemRecord*
                                        one engine for each set of settings that methods need
                                        the run is created, or resumed if it asks the same

    records = await evaluate(suite, "openai:my-model", run_dir="runs/first")

`memagent eval` and `evaluate` both open an evaluation here, so that they give the same records. For
progress or a dry run, take the steps one by one:

    request = make_request(suite, "scripted", limits=LimitSettings(max_calls=1000))
    async with open_evaluation(request, run_dir=Path("runs/first")) as evaluation:
        print(len(evaluation.records), "of", evaluation.num_items)
        records = await evaluation.evaluate(on_record=print)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memagent import trust
from memagent.agent.model_call import NO_LIMITS, LimitSettings
from memagent.agent.prompts import PROMPT_SETS, open_prompts
from memagent.agent.reader import check_section_ends
from memagent.config import EngineConfig
from memagent.data.tasks.lengths import length_tokenizer
from memagent.engines import store
from memagent.engines.addresses import key_of_named, origins, public_url
from memagent.engines.base import (
    SETTINGS,
    BaseEngine,
    EngineChoice,
    as_endpoint,
    check_stored,
    choose_engine,
    facts_of,
    split_spec,
)
from memagent.errors import ConfigError, EngineError, MemagentError, RunError, UserError
from memagent.eval.calls import EngineGate, GatedEmbedder
from memagent.eval.forecast import make_forecast
from memagent.eval.items import EvalPlan, ExamplePool, plan_items
from memagent.eval.methods import (
    MethodSettings,
    embedder_for,
    method_sha256,
    open_method,
    settings_for,
)
from memagent.eval.records import KIND, ItemRecord, parse_evaluation, read_evaluation
from memagent.eval.runner import Evaluation, OnRecord, OpenMethod
from memagent.eval.suites import (
    CLOSED_BOOK,
    MethodChoice,
    Suite,
    paths_of,
    with_absolute_paths,
)
from memagent.plugins import code_file, is_file_spec
from memagent.runs import MANIFEST, Run
from memagent.tokens.tokenizers import Tokenizer, open_tokenizer, tokenizer_for_model
from memagent.types import Completion, Engine, Message, Sampling

OpenEngine = Callable[[EngineChoice], Awaitable[BaseEngine]]
"""Opens an engine in another way than in this process, such as on a cluster."""
OnNote = Callable[[str], None]
"""Called with remarks for the user, one line each."""

LOCAL_SHARE = 4
"""A model in this process is sent a quarter of the calls that it can work on: 16 on a CPU, 256 on a GPU."""
STRETCHED = ("local", "vllm")
"""Kinds of engines that are opened with YaRN settings for the method yarn."""
YARN_FACTOR = 4.0
"""By which yarn extends the window that the model was trained with, where `engine_settings` of the method say nothing."""
ONE_CALL = ("direct", "yarn", "bm25", "dense", CLOSED_BOOK)
PROBE = (
    "The 3 clerks didn't mention Bergström's ledger; 12,480 barrels of salt were sold in 1871.\n\n"
)
"""Tokenizers that count the same number of tokens in this text are taken to be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """What an evaluation asks, of which engine, within which limits. Create it with `make_request`."""

    suite: Suite
    """With absolute paths, so that the run can be resumed from any folder."""
    suite_name: str | None = None
    engine: EngineChoice | Engine
    """How to open the engine, or one that is open already and stays so."""
    concurrency: int | None = None
    """Concurrent calls; None leaves it to the engine."""
    limits: LimitSettings = NO_LIMITS

    def engine_of(self, method: MethodChoice) -> EngineChoice | Engine:
        """The engine that answers a method: the request's, with the method's own settings."""
        own = dict(method.engine_settings)
        if not isinstance(self.engine, EngineChoice):
            if own:
                raise ConfigError(
                    f"{method.title} has `engine_settings`; name the engine instead of passing an open "
                    "one"
                )
            return self.engine
        if method.name == "yarn" and self.engine.kind in STRETCHED and "yarn_window" not in own:
            own.setdefault("yarn_factor", YARN_FACTOR)
        own |= key_of_named(own, self.engine.settings)
        return replace(self.engine, settings={**self.engine.settings, **own})

    def concurrency_of(self, engine: Engine) -> int:
        """Concurrent calls to an engine."""
        if endpoint := as_endpoint(engine):
            return endpoint.config.concurrency
        facts = facts_of(engine)
        usual = EngineConfig().concurrency
        if facts.runs_here and facts.calls_at_once:
            usual = max(usual, facts.calls_at_once // LOCAL_SHARE)
        return facts.num_replicas * (self.concurrency or usual)

    def to_dict(self, stored: EngineChoice) -> dict[str, Any]:
        """The request as a manifest stores it, with the engine as it may be stored."""
        return {
            "suite": self.suite.model_dump(mode="json"),
            "suite_name": self.suite_name,
            "engine": stored.spec,
            "engine_settings": dict(stored.settings),
            "concurrency": self.concurrency,
            "limits": self.limits.given,
        }


def make_request(
    suite: Suite,
    engine: Engine | str | None = None,
    *,
    engine_settings: Mapping[str, Any] | None = None,
    resumed: EvalRequest | None = None,
    suite_name: str | None = None,
    concurrency: int | None = None,
    limits: LimitSettings = NO_LIMITS,
) -> EvalRequest:
    """A request, checked. Missing values are those of the request that is `resumed`, if there is one.

    The engine is the one that is given here, else that of the resumed request, else the suite's, else the
    endpoint in the settings or the environment, else the embedded model.
    """
    suite = with_absolute_paths(suite)
    trust.remember("file", *(path for _, path in paths_of(suite)))
    for method in suite.methods:
        open_method(method.name)
        if prompts := _template_file(suite.agent | method.settings, method.name):
            open_prompts(prompts)
    settings = dict(engine_settings or {})
    concurrency = settings.pop("concurrency", None) or concurrency
    if resumed is not None:
        concurrency = concurrency or resumed.concurrency
    elif concurrency is None:
        concurrency = suite.engine_settings.get("concurrency")
    chosen: EngineChoice | Engine
    if engine is None or isinstance(engine, str):
        chosen = _choose_engine(suite, engine, settings, resumed)
        if concurrency is not None and EngineConfig in SETTINGS[chosen.kind]:
            chosen = replace(chosen, settings={**chosen.settings, "concurrency": concurrency})
    elif settings:
        raise ConfigError("the engine is open already; leave out `engine_settings`")
    else:
        chosen = engine
    request = EvalRequest(
        suite=suite,
        suite_name=suite_name or (resumed.suite_name if resumed else None),
        engine=chosen,
        concurrency=concurrency,
        limits=limits.over(resumed.limits) if resumed else limits,
    )
    _check_engines(request)
    request.limits.open()  # raises before an engine is opened in vain
    return request


def stored_request(
    run: Path, *, methods: Sequence[str] = (), named: Sequence[str] = ()
) -> EvalRequest:
    """The request that a run was started with. Nothing is loaded here.

    A run directory is data: code and files that it names are used only if the user named them before on this
    machine, or names them again among `methods`, or the settings that name them among `named`.
    """
    stored = read_evaluation(run).command
    if stored is None:
        raise ConfigError(
            f"{run} was started from Python with an open engine; resume it there, with `run_dir`"
        )
    suite = Suite.parse(stored.suite)
    for method in suite.methods:
        _check_stored_method(method, named=[code_file(name) for name in methods])
    trust.require_files(
        (setting, path)
        for setting, path in paths_of(suite)
        if not any(f"{setting}.".startswith(f"{one}.") for one in named)
    )
    for settings in (suite.agent, *(method.settings for method in suite.methods)):
        _check_stored_embedder(str(settings.get("embedder_url") or ""), run)
    return EvalRequest(
        suite=suite,
        suite_name=stored.suite_name,
        engine=EngineChoice(spec=stored.engine, settings=stored.engine_settings),
        concurrency=stored.concurrency,
        limits=stored.limits,
    )


def _check_stored_method(method: MethodChoice, *, named: Sequence[str]) -> None:
    """Raise ConfigError for a stored method whose code or endpoint the user has not named."""
    check_stored(method.engine_settings, {})
    if not is_file_spec(method.name):
        return
    if (file := code_file(method.name)) not in named:
        what, again = f"the method {method.name}", f"method={method.name}"
        trust.require("code", file, what=what, may="its code may run", again=again)


def _check_stored_embedder(url: str, run: Path) -> None:
    """Raise ConfigError for a stored endpoint of embeddings that the user has not named."""
    if not trust.is_known("address", *origins(url)):
        raise ConfigError(
            f"{run} names the endpoint {public_url(url)} for embeddings, which you have not named on this "
            "machine; if the text may go there, start a run of your own with it"
        )


def _choose_engine(
    suite: Suite, spec: str | None, settings: Mapping[str, Any], resumed: EvalRequest | None
) -> EngineChoice:
    """The engine with all its settings; those of the suite are for its own kind of engine."""
    if resumed is not None:
        assert isinstance(resumed.engine, EngineChoice), "stored requests name their engine"
        choice = choose_engine(spec, settings, stored=resumed.engine)
    else:
        if spec is None and settings.get("model") is None and settings.get("base_url") is None:
            spec = suite.engine
        choice = choose_engine(spec, settings)
        own = {name: v for name, v in suite.engine_settings.items() if name != "concurrency"}
        if own and (suite.engine is None or split_spec(suite.engine)[0] == choice.kind):
            both = {**own, **settings, "model": None}
            choice = replace(choose_engine(choice.spec, both), is_embedded=choice.is_embedded)
    address = suite.engine_settings.get("base_url")
    if address == choice.settings.get("base_url") and settings.get("base_url") is None:
        if address is not None and settings.get("api_key") is not None:
            raise ConfigError(
                f"the suite names the endpoint {public_url(str(address))}; if `api_key` is for it, give `base_url`, too"
            )
        key = key_of_named(suite.engine_settings, {})
        choice = replace(choice, settings={**choice.settings, **key})
    if choice.kind == "vllm":  # only training needs token ids, and they make replies long
        choice = replace(choice, settings={"token_ids": False, **choice.settings})
    return choice


def _check_engines(request: EvalRequest) -> None:
    """Two vLLM servers do not fit the same GPUs; local models and endpoints may be opened twice."""
    engines = [request.engine_of(method) for method in request.suite.methods]
    for method, engine in zip(request.suite.methods, engines, strict=True):
        if isinstance(engine, EngineChoice) and engine.kind == "vllm" and engine != engines[0]:
            raise ConfigError(
                f"{request.suite.methods[0].title} and {method.title} need vLLM with different "
                "settings; evaluate them in separate runs"
            )


# --- opening --------------------------------------------------------------------------------------


async def evaluate(
    suite: Suite,
    engine: Engine | str | None = None,
    *,
    engine_settings: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    concurrency: int | None = None,
    limits: LimitSettings = NO_LIMITS,
    processes: int | None = None,
    on_record: OnRecord | None = None,
    on_note: OnNote | None = None,
) -> list[ItemRecord]:
    """The records of a suite, without traces.

    The engine is a name such as `local:smollm2-135m`, which is opened with `engine_settings` and closed,
    or an open engine, which stays open. With a run directory every record is on disk when it is
    finished; a directory that holds this evaluation already is resumed.
    """
    request = make_request(
        suite,
        engine,
        engine_settings=engine_settings,
        concurrency=concurrency,
        limits=limits,
    )
    path = Path(run_dir) if run_dir is not None else None
    is_there = path is not None and (path / MANIFEST).exists()
    async with open_evaluation(
        request, run_dir=path, resume=is_there, processes=processes, on_note=on_note
    ) as evaluation:
        return await evaluation.evaluate(on_record=on_record)


@asynccontextmanager
async def open_evaluation(
    request: EvalRequest,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    processes: int | None = None,
    open_engine: OpenEngine | None = None,
    on_note: OnNote | None = None,
    is_dry: bool = False,
) -> AsyncIterator[Evaluation]:
    """An evaluation, ready for its first call; mistakes that need no call to be found are raised here.

    Without `run_dir` nothing is written; with `resume` it must hold a run that asks the same. `processes`
    generate examples; 0 uses a thread of this one, None decides by the amount of text. `open_engine` opens the
    engines; by default they are opened in this process. `is_dry` is for the forecast alone: texts of files are
    rebuilt, too, vLLM is not started, and no model is downloaded or asked.
    """
    from memagent.eval.select import with_questions  # which asks by evaluations of its own

    suite = request.suite
    asked = suite if is_dry else await with_questions(suite, on_note=on_note)
    async with AsyncExitStack() as stack:
        gates = _Gates(request, open_engine, is_dry=is_dry)
        stack.push_async_callback(gates.aclose)
        first = (await gates.open(suite.methods[0])).engine
        tokenizer = _open_tokenizer(suite, first, on_note)
        plan = plan_items(asked, length_tokenizer=length_name(suite, first, tokenizer))
        _compare_tokenizers(plan, tokenizer, on_note)
        methods = []
        for choice in suite.methods:
            method = await _open_method(request, gates, choice, tokenizer, on_note, is_dry=is_dry)
            methods.append(method)
            if method.embedder is not None:
                stack.push_async_callback(method.embedder.aclose)
        pool = stack.enter_context(ExamplePool(plan, processes=0 if is_dry else processes))
        sources = await pool.check(plan, with_files=is_dry)
        run = None
        if run_dir is not None:
            identity = _identity(suite, first, tokenizer, plan, methods, sources)
            if resume:
                run = open_run(run_dir, identity)
            else:
                run = Run.create(
                    run_dir,
                    _manifest(
                        request, first, identity, len(plan.items) * len(methods) * suite.samples
                    ),
                )
            stack.enter_context(run)
        evaluation = Evaluation(
            plan,
            pool,
            methods,
            seed=suite.seed,
            run=run,
            limits=request.limits.open(),
            prices=request.limits.prices,
            concurrency=max(method.gate.concurrency for method in methods),
            graders=suite.graders,
            samples=suite.samples,
        )
        with (
            nullcontext() if is_dry else suppress(MemagentError)
        ):  # an estimate is no reason to stop
            if {item.task for item in plan.items} <= pool.samples.keys():
                evaluation.forecast = await asyncio.to_thread(
                    make_forecast, plan, methods, pool.samples, samples=suite.samples
                )
        try:
            yield evaluation
        except UserError:
            if run is not None:
                run.discard_if_empty()  # nothing was finished: there is nothing to resume
            raise


# --- engines and tokenizers -----------------------------------------------------------------------


class _Gates:
    """The engines of an evaluation, each behind its gate; methods with the same settings share one."""

    def __init__(
        self, request: EvalRequest, open_engine: OpenEngine | None = None, *, is_dry: bool = False
    ) -> None:
        """With `is_dry` nothing is downloaded and no server is started."""
        self._request = request
        self._is_dry = is_dry
        self._open_engine = open_engine
        self._gates: dict[str, EngineGate] = {}
        self._opened: list[BaseEngine] = []

    async def open(self, method: MethodChoice) -> EngineGate:
        """The gate of the engine that answers a method."""
        engine = self._request.engine_of(method)
        settings = dict(engine.settings) if isinstance(engine, EngineChoice) else {}
        key = json.dumps(settings, sort_keys=True, default=str)
        if key not in self._gates:
            if isinstance(engine, EngineChoice):
                is_away = engine.model in store.KNOWN and store.find(engine.model) is None
                is_costly = engine.kind == "vllm" or (engine.kind == "local" and is_away)
                if self._is_dry and is_costly:  # opening it starts a server, or downloads a model
                    engine = UnopenedEngine(engine.model)
                elif self._open_engine is not None:
                    engine = await self._open_engine(engine)
                else:
                    engine = engine.open()
                self._opened.append(engine)
            if endpoint := as_endpoint(engine):
                await endpoint.inspect()
            concurrency = self._request.concurrency_of(engine)
            self._gates[key] = EngineGate(engine, concurrency=concurrency)
        return self._gates[key]

    async def aclose(self) -> None:
        """Close the engines that were opened here."""
        for engine in self._opened:
            await engine.aclose()


class UnopenedEngine(BaseEngine):
    """A model that is not opened for a dry run: what is known of it by its name."""

    def __init__(self, model: str) -> None:
        self.model = self.tokenizer = model
        known = store.KNOWN.get(model)
        self.served_window = known.window if known else None
        self.reading_defaults = store.reading_defaults(model)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        raise EngineError(f"{self.model} is not open")

    async def aclose(self) -> None:
        """Nothing to free."""


def _open_tokenizer(suite: Suite, engine: Engine, on_note: OnNote | None) -> Tokenizer:
    if suite.tokenizer is not None:
        return open_tokenizer(suite.tokenizer)
    tokenizer, reason = tokenizer_for_model(engine.tokenizer)
    if reason and on_note:
        on_note(f"token counts are estimated with a margin: {reason}; `tokenizer` names one")
    return tokenizer


def length_name(suite: Suite, engine: Engine, tokenizer: Tokenizer) -> str | None:
    """The tokenizer of lengths where the suite names none: the model's own, if it is known."""
    if engine.model in store.KNOWN and as_endpoint(engine) is None:
        return engine.model  # the same on every machine, unlike the path of its tokenizer
    if not tokenizer.is_exact:
        return None
    return suite.tokenizer or engine.tokenizer


def _compare_tokenizers(plan: EvalPlan, tokenizer: Tokenizer, on_note: OnNote | None) -> None:
    if on_note is None or not tokenizer.is_exact:
        return
    for name in plan.tokenizers:
        with suppress(MemagentError):  # a file generated elsewhere may name one that is not here
            if length_tokenizer(name).count(PROBE) != tokenizer.count(PROBE):
                on_note(
                    f"lengths are counted by the tokenizer {name}; the model's own "
                    f"({tokenizer.name}) counts differently"
                )


async def _open_method(
    request: EvalRequest,
    gates: _Gates,
    choice: MethodChoice,
    tokenizer: Tokenizer,
    on_note: OnNote | None,
    *,
    is_dry: bool = False,
) -> OpenMethod:
    gate = await gates.open(choice)
    is_ours = isinstance(request.engine, EngineChoice) and request.engine.kind in STRETCHED
    if choice.name == "yarn" and not is_ours and on_note:
        on_note(
            f"{choice.title}: the endpoint must serve {gate.engine.model} with YaRN settings; "
            "`engine=vllm:MODEL` starts it so"
        )
    settings = settings_for(choice.name, gate.engine, request.suite.agent, choice.settings)
    if choice.name.partition(":")[0] not in ONE_CALL:
        check_section_ends(settings, tokenizer, gate.engine.model)
    if request.suite.samples > 1 and settings.temperature == 0 and on_note:
        on_note(f"{choice.title}: samples of a question do not differ at `temperature=0`; raise it")
    embedder = None
    if not is_dry:
        embedder = embedder_for(choice.name, settings, gate.engine)
    return OpenMethod(
        title=choice.title,
        kind=choice.name,
        function=open_method(choice.name),
        settings=settings,
        gate=gate,
        tokenizer=tokenizer,
        embedder=embedder and GatedEmbedder(embedder, gate),
    )


# --- the run --------------------------------------------------------------------------------------


def _identity(
    suite: Suite,
    engine: Engine,
    tokenizer: Tokenizer,
    plan: EvalPlan,
    methods: Sequence[OpenMethod],
    sources: dict[str, str],
) -> dict[str, Any]:
    """Everything that decides the records of a run."""
    return {
        "model": engine.model,
        "tokenizer": tokenizer.name,
        "length_tokenizer": ", ".join(plan.tokenizers) or None,
        "seed": suite.seed,
        "grader": suite.grader,
        "reply_limit": suite.reply_limit if suite.reply_limit != "graded" else None,
        "graders": suite.graders or None,
        "samples": suite.samples if suite.samples > 1 else None,
        "num": suite.num,
        "tasks": [task.model_dump(mode="json", exclude={"files"}) for task in suite.tasks],
        "methods": {
            method.title: {
                "name": choice.name,
                "settings": method.settings.model_dump(mode="json", exclude={"seed"}),
                "sha256": method_sha256(choice.name),
                **_wording(method.settings, choice.name),
            }
            for method, choice in zip(methods, suite.methods, strict=True)
        },
        "files": {Path(name).name: digest for name, digest in plan.files.items()},
        "sources": sources,
    }


def _wording(settings: MethodSettings, method: str) -> dict[str, str]:
    """The fingerprints of the reader's prompts, where they come from a file."""
    file = _template_file(settings.model_dump(), method)
    if file is None:
        return {}
    prompts = open_prompts(file)
    merging = {"merging": prompts.merging_sha256} if settings.merges else {}
    return {"prompts": prompts.sha256, **merging}


def _template_file(settings: Mapping[str, Any], method: str) -> str | None:
    """The file of the reader's prompts; None for a prompt set, and for other methods."""
    kind, _, own = method.partition(":")
    name = str(own or settings.get("prompts") or "")
    return name if kind == "reader" and name and name not in PROMPT_SETS else None


def _manifest(
    request: EvalRequest, engine: Engine, identity: dict[str, Any], num_items: int
) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "kind": KIND,
        "suite": request.suite_name,
        **identity,
        "num_items": num_items,
        "engine": {"spec": engine.model, "settings": {}},
        "identity": identity,
    }
    if not isinstance(request.engine, EngineChoice):
        return manifest
    assert isinstance(engine, BaseEngine), "engines that are opened by name are ours"
    stored = request.engine.kept(engine)
    named = request.suite.methods
    trust.remember(
        "code", *(code_file(method.name) for method in named if is_file_spec(method.name))
    )
    urls = [method.engine_settings.get("base_url") for method in named]
    urls += [method.settings.get("embedder_url") for method in named]
    for url in (*urls, request.suite.agent.get("embedder_url")):
        if url:
            trust.remember("address", *origins(str(url)))
    return {
        **manifest,
        "engine": {"spec": request.engine.spec, "settings": dict(stored.settings)},
        "command": request.to_dict(stored),
    }


def open_run(path: Path, identity: Mapping[str, Any]) -> Run:
    """A run to resume. Raises RunError when it asks something else."""
    run = Run.open(path, shrink=lambda record: {**record, "trace": {}})
    try:
        check_same(run.manifest, identity, path)
    except RunError:
        run.close()
        raise
    return run


def check_same(stored: Mapping[str, Any], identity: Mapping[str, Any], path: Path) -> None:
    """Raise RunError with the first difference between a run's identity and another."""
    then, now = parse_evaluation(stored, path).identity, json.loads(json.dumps(identity))
    if difference := _difference(then, now):
        raise RunError(f"cannot resume {path}: {difference}; start a new run for it")


def _difference(then: Any, now: Any, name: str = "") -> str | None:
    """The first difference between two JSON values, as deep as it can be named."""
    if isinstance(then, dict) and isinstance(now, dict):
        parts = ((f"{name}.{key}", then.get(key), now.get(key)) for key in {**then, **now})
        return next(filter(None, (_difference(a, b, part) for part, a, b in parts)), None)
    if then == now:
        return None
    return f"{name.removeprefix('.')} was {_short(then)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
