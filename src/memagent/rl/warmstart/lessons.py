"""Lessons of the warm start: batches of examples as rows of tokens, in a reproducible order.

    lessons = FileLessons(settings, model=loaded, max_tokens=4096, seed=0)
    lessons.batch(7).examples      # the samples of each example of the eighth step

Examples come from tasks, with replies by rule for the agent in training, or from files of conversations,
in a new random order in each pass. For a demonstration the agent that will be trained is played with the right replies,
so prompts are exactly those of its rollouts; what exceeds the agent's limits is refused, never shortened.

    show = demonstrations_for("calculator", tokenizer=open_tokenizer("./my-model"))
    show(problem(0, seed=7))         # [system, problem, <calc>..., result, \\boxed{...}]
    show = demonstrations_for("my_agent.py:agent", tokenizer=..., replies="my_agent.py:replies")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from memagent import blocking
from memagent.data.example import Example
from memagent.engines.local.loading import LoadedModel
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError, DataError, MemagentError
from memagent.plugins import error_line, is_file_spec, load_function
from memagent.rl.agents import memory
from memagent.rl.agents.api import AGENTS, Agent, check_outcome, open_agent, with_defaults
from memagent.rl.agents.client import Client
from memagent.rl.agents.command import is_command
from memagent.rl.agents.expressions import calculate
from memagent.rl.agents.recorder import Call, Turn, continued_prompt, merge_calls
from memagent.rl.agents.session import Session
from memagent.rl.rollouts.tasks import OpenSource, TaskStream, shuffled
from memagent.rl.settings import SftSettings
from memagent.rl.types import Sample
from memagent.rl.update.rows import TrainingRow
from memagent.rl.warmstart import traces
from memagent.rl.warmstart.conversations import Conversation, read_conversations
from memagent.rl.warmstart.traces import TraceRefused
from memagent.tokens.tokenizers import ByteTokenizer, Tokenizer
from memagent.types import Message, Sampling

NO_LIMIT = 1 << 30
READER = "memory"
"""The agent that reads sections."""
MEMORY_LIMITS = ("chunk_tokens", "memory_tokens", "answer_tokens", "quote_tokens")

Demonstrations = Callable[[Example], list[Conversation]]
"""The conversations of an example, with replies that lead to a right answer."""


def demonstrations_for(
    agent: str,
    settings: Mapping[str, Any] | None = None,
    *,
    tokenizer: Tokenizer,
    replies: str | None = None,
) -> Demonstrations:
    """Demonstrations of an agent. `tokenizer` is the model's, to check the agent's limits.

    `replies` names a function of the user, `path.py:function`: the right replies to a task, in order. The
    shipped agents have a rule of their own.
    """
    if (is_file_spec(agent) or is_command(agent)) and replies is None:
        raise ConfigError(
            f"there is no rule for the replies of {agent}; name a function that writes them as "
            "`warm_start.replies=path.py:function`, or use files of conversations for its warm start"
        )
    opened = open_agent(agent, settings)  # checks the name and the settings
    if replies is not None:
        return partial(_played, opened, _users_rule(replies), tokenizer)
    if agent == READER:
        config = with_defaults(memory.DEFAULTS, settings or {})
        return partial(traces.conversations, config=config, tokenizer=tokenizer)
    return partial(_played, opened, REPLIES[agent], tokenizer)


def texts_for(agent: str, settings: Mapping[str, Any] | None, example: Example) -> list[str]:
    """All texts of an example's demonstrations, whatever the limits: to train a tokenizer on."""
    if agent not in AGENTS:
        return [example.text(), example.question, *example.answers]
    limits = MEMORY_LIMITS if agent == READER else ("max_tokens",)
    values = {**(settings or {}), **dict.fromkeys(limits, NO_LIMIT)}
    if agent == READER:
        values["window"] = 8 * NO_LIMIT
    found = demonstrations_for(agent, values, tokenizer=ByteTokenizer())(example)
    texts = [message["content"] for one in found for message in one.messages]
    return [*texts, traces.NOTHING_YET] if agent == READER else texts


# --- replies by rule --------------------------------------------------------------------------------


def calculation(example: Example) -> list[str]:
    """Send the whole expression to the calculator, then answer with its result."""
    expression = example.metadata.get("expression")
    if not isinstance(expression, str):
        raise DataError(
            f"{example.id} has no expression in its metadata; the calculator has demonstrations for "
            "tasks of arithmetic only"
        )
    return [f"<calc>{expression}</calc>", _boxed(calculate(expression))]


def answer(example: Example) -> list[str]:
    """Answer at once."""
    if not example.answers:
        raise DataError(f"{example.id} has no accepted answer to demonstrate")
    answers = example.answers if example.match == "all" else example.answers[:1]
    return [_boxed(", ".join(answers))]


REPLIES: dict[str, Callable[[Example], list[str]]] = {"calculator": calculation, "single": answer}
"""The replies of the model in order, by agent. Those of readers are in `traces.py`."""


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _users_rule(spec: str) -> Callable[[Example], list[str]]:
    """The replies that a function of the user writes. None or no replies skip an example."""
    function = load_function(spec, what="function that writes replies", parameters=("task",))

    def rule(example: Example) -> list[str]:
        try:
            found = function(example)
            replies = None if found is None else list(found)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{spec} fails on {example.id}: {error_line(error)}") from None
        if not replies:
            raise TraceRefused(f"{spec} has no replies for {example.id}")
        if isinstance(found, str) or not all(isinstance(reply, str) for reply in replies):
            raise ConfigError(
                f"{spec} returned {type(found).__name__} for {example.id}; return a list of texts, the "
                "replies in order"
            )
        return replies

    return rule


def _played(
    agent: Agent, rule: Callable[[Example], list[str]], tokenizer: Tokenizer, example: Example
) -> list[Conversation]:
    """The conversations of an agent that gets these replies."""
    replies = rule(example)
    upcoming = iter(replies)

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        reply = next(upcoming, None)
        if reply is None:
            raise ConfigError(
                f"{example.id}: the agent asks for more than the {len(replies)} replies of its "
                "demonstration"
            )
        num_tokens = tokenizer.count(reply) + 1  # the end-of-reply token
        if num_tokens > sampling.max_tokens:
            raise ConfigError(
                f"{example.id}: its reply has {num_tokens} tokens, more than the agent's "
                f"`max_tokens={sampling.max_tokens}`; raise `max_tokens`"
            )
        return reply

    engine = ScriptedEngine(script)
    engine.tokenizer = tokenizer.name
    session = Session(engine, task_id=example.id, index=0, seed=0, needs_tokens=False)
    blocking.run(_outcome(agent, example, Client(session)))
    if len(engine.prompts) < len(replies):
        raise ConfigError(
            f"{example.id} takes {len(replies)} replies, and the agent asks for "
            f"{len(engine.prompts)}; raise `max_turns`, or the agent's own limit"
        )
    return [
        Conversation(id=example.id, messages=messages)
        for messages in _longest(engine.prompts, replies)
    ]


def _longest(
    prompts: Sequence[Sequence[Message]], replies: Sequence[str]
) -> list[tuple[Message, ...]]:
    """The calls as conversations, without those that a later call continues."""
    calls: list[tuple[Message, ...]] = [
        (*prompt, {"role": "assistant", "content": reply})
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    return [
        call
        for number, call in enumerate(calls)
        if not any(later[: len(call)] == call for later in calls[number + 1 :])
    ]


async def _outcome(agent: Agent, example: Example, client: Client) -> None:
    try:
        outcome: object = await agent(example, client)
    except MemagentError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the agent fails on the demonstration of {example.id}: {error_line(error)}"
        ) from None
    check_outcome(outcome)


LESSON_SEED = 2_000_003
"""Added to the seed of a run, so that demonstrations are of other examples than rollouts."""
MAX_REFUSED = 100
"""This many examples without a demonstration mean that there are none."""


class LessonBatch(NamedTuple):
    """The rows of one step."""

    examples: list[list[Sample]]
    """The rows of each example."""
    num_refused: int = 0
    """Examples that were skipped because there is no rule for them."""


class Lessons(Protocol):
    """Supplies the rows of each step."""

    def batch(self, step: int) -> LessonBatch:
        """The rows of a step; steps count from 0."""
        ...


def ahead(lessons: Lessons, first: int, end: int) -> Iterator[LessonBatch]:
    """The batches of steps `first` to `end`, each prepared in a thread during the step before."""
    with ThreadPoolExecutor(1, thread_name_prefix="memagent-lessons") as thread:
        upcoming = thread.submit(lessons.batch, first)
        for step in range(first + 1, end):
            batch = upcoming.result()
            upcoming = thread.submit(lessons.batch, step)
            yield batch
        yield upcoming.result()


class TaskLessons:
    """Demonstrations by rule. Examples without a rule are skipped and counted."""

    def __init__(
        self,
        settings: SftSettings,
        sources: Sequence[OpenSource],
        show: Callable[[Example], Sequence[Conversation]],
        *,
        model: LoadedModel,
        max_tokens: int,
        seed: int,
    ) -> None:
        """`max_tokens` limits a packed sequence."""
        self._settings = settings
        self._sources = sources
        self._stream = TaskStream(sources, seed=seed)
        self._show = show
        self._model = model
        self._max_tokens = max_tokens

    def check_sources(self) -> None:
        """Build the rows of the first example of each source, to find errors before the first step."""
        for source in self._sources:
            example = source.examples.example(0)
            with suppress(TraceRefused):  # counted where it is skipped
                _rows(self._show(example), self._model, self._max_tokens)

    def batch(self, step: int) -> LessonBatch:
        """The rows of a step."""
        # Each step has its own range of the stream, with spare examples for those without a rule.
        width = self._settings.batch + MAX_REFUSED
        self._stream.move_to(step * width)
        found: list[list[Sample]] = []
        num_refused, reason = 0, ""
        for _ in range(width):
            if len(found) == self._settings.batch:
                break
            try:
                shown = self._show(self._stream.draw(1)[0])
            except TraceRefused as error:
                num_refused, reason = num_refused + 1, str(error)
                continue
            found.append(_rows(shown, self._model, self._max_tokens))
        if not found:
            raise ConfigError(
                f"the warm start has no demonstrations: {reason}; set other `warm_start.tasks`"
            )
        return LessonBatch(found, num_refused)


class FileLessons:
    """Conversations of files, those of one example together."""

    def __init__(
        self, settings: SftSettings, *, model: LoadedModel, max_tokens: int, seed: int
    ) -> None:
        self._batch = settings.batch
        self._model = model
        self._max_tokens = max_tokens
        self._seed = seed
        self._examples: list[tuple[Conversation, ...]] = []
        for name in settings.files:
            self._examples += read_conversations(Path(name).expanduser())

    def batch(self, step: int) -> LessonBatch:
        """The rows of a step."""
        found = []
        for number in range(step * self._batch, (step + 1) * self._batch):
            pass_number, place = divmod(number, len(self._examples))
            order = shuffled(len(self._examples), self._seed, "lessons", pass_number)
            found.append(_rows(self._examples[order[place]], self._model, self._max_tokens))
        return LessonBatch(found)


def _rows(
    conversations: Sequence[Conversation], model: LoadedModel, max_tokens: int
) -> list[Sample]:
    """The rows of all conversations of an example."""
    return [
        sample for one in conversations for sample in tokenized(one, model, max_tokens=max_tokens)
    ]


# --- rows of tokens -------------------------------------------------------------------------------

#     Conversation ─▶ tokenized ─▶ Sample* ─▶ sft_rows ─▶ TrainingRow* ─▶ `Learner.fit`
# Tokens are those of a rollout with the same replies: the prompt as the engine sends it, the reply, the token
# that ends it. A conversation of several replies is one row where its prompts extend each other, by the
# rules of `recorder.py`.


def tokenized(
    conversation: Conversation, loaded: LoadedModel, *, max_tokens: int
) -> tuple[Sample, ...]:
    """The rows of a conversation. Every reply of the assistant carries loss.

    A conversation that exceeds `max_tokens`, the limit of a packed sequence, or the window of the model is
    refused: training on half a reply would teach the model to stop there.
    """
    end = end_id(loaded)
    calls: list[Call] = []
    turn: Turn | None = None
    for place, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        turn = _turn(conversation, place, loaded, end, before=turn)
        calls.append(turn.call)
    num_tokens = max(len(call.ids) for call in calls)
    if num_tokens > loaded.window:
        raise DataError(
            f"{conversation.id}: a conversation has {num_tokens} tokens, and the window of "
            f"{loaded.name} is {loaded.window}; remove it, or lower the agent's `chunk_tokens`"
        )
    if num_tokens > max_tokens:
        raise ConfigError(
            f"{conversation.id}: a conversation has {num_tokens} tokens, more than a packed "
            f"sequence of {max_tokens}; set `update.max_tokens={num_tokens}`"
        )
    return merge_calls(calls)


def sft_rows(examples: Sequence[Sequence[Sample]]) -> tuple[TrainingRow, ...]:
    """The rows of one optimizer step, from the samples of each example; all tokens have the same weight, together 1."""
    total = sum(sample.num_sampled for samples in examples for sample in samples)
    return tuple(
        TrainingRow(sample=sample, group=number, rollout=number, advantage=1.0, weight=1 / total)
        for number, samples in enumerate(examples)
        for sample in samples
    )


def end_id(loaded: LoadedModel) -> int:
    """The token that ends a reply: the chat template's if it is an end token of the model."""
    if not loaded.eos_ids:
        raise ConfigError(
            f"{loaded.name} has no end token; set eos_token_id in its generation_config.json"
        )
    probe: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    written = loaded.vocabulary.encode(loaded.vocabulary.rendered(probe, is_open=False))
    return next(
        (token for token in reversed(written) if token in loaded.eos_ids), loaded.eos_ids[0]
    )


def _turn(
    conversation: Conversation, place: int, loaded: LoadedModel, end: int, *, before: Turn | None
) -> Turn:
    """A reply as if the model had sampled it after the messages before it."""
    messages = conversation.messages[:place]
    reply = conversation.messages[place]["content"]
    rendered = loaded.vocabulary.prompt_ids(messages)
    prompt = (
        continued_prompt(before, rendered, loaded.vocabulary.decode) if before is not None else None
    )
    reply_ids = loaded.vocabulary.encode(reply)
    if loaded.vocabulary.decode(reply_ids).strip() != reply.strip():
        raise DataError(
            f"{conversation.id}: the reply {reply[:40]!r} is not what its tokens decode to; remove "
            "special tokens of the chat template from it"
        )
    sampled_ids = (*reply_ids, end)
    return Turn(
        messages=messages,
        reply=reply,
        rendered_ids=tuple(rendered),
        call=Call(
            prompt_ids=tuple(rendered) if prompt is None else prompt,
            completion_ids=sampled_ids,
            logprobs=(0.0,) * len(sampled_ids),
            policy_version=0,
        ),
    )
