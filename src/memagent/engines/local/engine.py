"""The embedded engine: a model in this process, generating for many requests at once.

A dedicated thread runs the generator; requests arrive from any event loop and their replies return to
it. Weights are the model's own parameters: `update_weights` copies new values into them. Code that holds the
model may also change them in place, and call `weights_changed` or use `changing_weights`.

    async with open_engine("local:./my-model") as engine:
        completion = await engine.complete(messages, Sampling(max_tokens=100))
        completion.completion_ids, completion.logprobs, completion.policy_version

        async for item in engine.stream(engine.prompt_ids(messages), Sampling(max_tokens=100)):
            item    # a StreamedToken for each token, then the Completion

        engine.update_weights(trained.named_parameters())    # completions carry the next version

        with engine.changing_weights():  # in place, also while requests run; they continue with the new ones
            ...

        with engine.hold(fresh=True):    # requests submitted inside start together, in order
            ...

The composition of a batch affects the last bits of a log-probability. By default the thread takes whatever
has arrived; requests that start together on an empty cache are computed identically every time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from memagent.config import LocalConfig
from memagent.engines import store
from memagent.engines.base import BaseEngine
from memagent.engines.local.generator import BatchOutOfMemory, Generator, TextStream
from memagent.engines.local.loading import LoadedModel, is_out_of_memory, load
from memagent.engines.local.scheduler import GenerationRequest
from memagent.errors import (
    ConfigError,
    EngineError,
    EngineRefused,
    MachineError,
    MemagentError,
    PromptTooLong,
)
from memagent.names import nearest
from memagent.types import Completion, EngineLoad, Message, Sampling, StreamedToken, Usage

SEED_BITS = 63
SWITCH_SECONDS = 0.0001
"""How long another thread may keep the interpreter from the one that launches kernels on a GPU: each launch gives
it up, and Python's default is fifty times as long."""
STOP_MARGIN_TOKENS = 8
"""Stop texts are searched in the last tokens: at most one per byte, plus this margin."""


def open_torch(model: str, config: LocalConfig) -> LocalEngine:
    """An engine for a model on this machine: a pulled one by name, a folder, or a GGUF file."""
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.partition(":")[0] == "cuda"
    loaded = load(
        model,
        adapter=config.adapter,
        device=device,
        merged=is_gpu if config.merged is None else config.merged,
        yarn_window=config.yarn_window,
        yarn_factor=config.yarn_factor,
    )
    return LocalEngine(loaded, config)


class LocalEngine(BaseEngine):
    """A model in this process."""

    runs_here = True
    runtime = "torch"

    def __init__(self, loaded: LoadedModel, config: LocalConfig | None = None) -> None:
        config = config or LocalConfig()
        self.model = loaded.name
        self.tokenizer = str(loaded.tokenizer_folder)
        self.vocabulary = loaded.vocabulary
        self.public_name = store.public_name(loaded.name)
        self.served_window: int = loaded.window
        self.reading_defaults = store.reading_defaults(loaded.name)
        self._loaded = loaded
        self._is_gpu = is_gpu = loaded.model.device.type == "cuda"
        self.calls_at_once = config.max_running or (1024 if is_gpu else 64)
        cache_gb = config.cache_gb or (_half_free_gb(loaded.model.device) if is_gpu else 2.0)
        with _cache_errors(loaded.model.device, cache_gb):
            self._generator = Generator(
                loaded.model,
                num_slots=_num_slots(loaded, cache_gb),
                eos_ids=loaded.eos_ids,
                max_batch_tokens=config.max_batch_tokens or (32768 if is_gpu else 512),
                max_running=self.calls_at_once,
                ends_text=self._ends_text,
                on_tokens=self._forward,
            )
        self._listeners: dict[GenerationRequest, _Listener] = {}
        self._inbox: list[GenerationRequest] = []
        """Requests that arrived during a step; the thread takes them before the next."""
        self._changed = threading.Condition()
        """Guards inbox and flags; never held during a step, so a caller's event loop does not block."""
        self._is_closed = False
        self._is_updating = False
        """While true, new requests wait: the weights are changing."""
        self._is_stepping = False
        """While true, the thread computes with the weights."""
        self._num_holds = 0
        """While above 0 nothing is computed, so that requests start together."""
        self._wants_fresh = False
        self._is_broken = False
        """Whether the GPU has failed."""
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()
        """Guards what happens after the thread has ended."""

    @property
    def is_alive(self) -> bool:
        """False after an error of the GPU, which this process cannot use any more."""
        return not self._is_broken

    @property
    def policy_version(self) -> int:
        """Weight updates since the engine was opened, or the version set by `weights_changed`."""
        return self._generator.policy_version

    @property
    def vocab_size(self) -> int:
        """Token ids of prompts are below this."""
        return int(self._loaded.model.config.vocab_size)

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is. Safe to read from any thread."""
        scheduler = self._generator.scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._inbox),
            num_slots=scheduler.pool.num_slots,
            num_used_slots=scheduler.pool.num_slots - scheduler.pool.num_free,
        )

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply to a conversation, in the model's own chat template."""
        return await self.generate(self.prompt_ids(messages), sampling)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One reply to a prompt of tokens. Cancelling the call frees its slots."""
        request = self._request(prompt_ids, sampling)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[GenerationRequest] = loop.create_future()
        self._submit(request, _ReplyListener(loop, done))
        try:
            await done
        except asyncio.CancelledError:
            self._cancel(request)
            raise
        return self._completion(request)

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[StreamedToken | Completion, None]:
        """The tokens of one reply as they are sampled, and last the completion.

        An invalid request raises here, before the first token. Closing the iterator
        (`contextlib.aclosing`) or cancelling the task that consumes it frees the request's slots.
        """
        return self._stream(self._request(prompt_ids, sampling))

    def update_weights(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        policy_version: int | None = None,
        while_running: bool = False,
    ) -> int:
        """Copy new values into the model's parameters; the new policy version.

        Names are those of `model.named_parameters()`, including LoRA's; other parameters keep their
        values. All weights are checked before the first one changes. Raises ConfigError while a request
        runs, unless `while_running`; requests that arrive during the update use the new weights.
        """
        with self.changing_weights(policy_version, while_running=while_running):
            pairs = _checked_weights(self._loaded.model, weights)
            with torch.no_grad():
                for parameter, value in pairs:
                    parameter.copy_(value)
        return self.policy_version

    def weights_changed(self, policy_version: int | None = None) -> None:
        """Announce that the model's parameters have changed; no request may be running.

        Completions carry the given version from now on, or the next one.
        """
        with self.changing_weights(policy_version, while_running=False):
            pass

    @contextmanager
    def changing_weights(
        self, policy_version: int | None = None, *, while_running: bool = True
    ) -> Iterator[None]:
        """Change the model's parameters inside the block.

        Requests wait, and then continue with the new weights: their tokens so far are computed again, and
        `Completion.token_versions` tells which weights sampled which. Entering waits for the end of a step.
        Without `while_running` it raises ConfigError when there are requests.
        """
        with self._changed:
            is_busy = not while_running and (self._inbox or self._generator.has_work)
            if self._is_updating or is_busy:
                raise ConfigError("the weights can only change while no request is running")
            self._is_updating = True
            while self._is_stepping:
                self._changed.wait()
        try:
            yield
            self._generator.weights_changed(policy_version)
        finally:
            with self._changed:
                self._is_updating = False
                self._changed.notify_all()

    @contextmanager
    def hold(self, *, fresh: bool = False) -> Iterator[None]:
        """Compute nothing inside the block; requests submitted in it start together, in order.

        With `fresh`, cached prompts are dropped first, unless requests still run.
        """
        with self._changed:
            self._num_holds += 1
            self._wants_fresh = self._wants_fresh or fresh
        try:
            yield
        finally:
            with self._changed:
                self._num_holds -= 1
                self._changed.notify_all()

    async def drop_prompts(self, cache_salt: str | None) -> None:
        """Drop what is cached of prompts with this salt and not in use."""
        tree = self._generator.scheduler.tree
        await asyncio.to_thread(self._between_steps, lambda: tree.drop_unused(cache_salt or ""))

    def _between_steps(self, act: Callable[[], None]) -> None:
        """Do something while nothing is computed; waits for the end of a step."""
        with self.hold():
            with self._changed:
                while self._is_stepping:
                    self._changed.wait()
            act()

    async def aclose(self) -> None:
        """Stop the thread; running requests fail, and the cache is freed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """Wait for the thread, and free what it used."""
        with self._ending:
            if self._thread:
                self._thread.join()
                self._thread = None
            self._generator.close()

    # --- requests ------------------------------------------------------------------------------

    def _request(self, prompt_ids: Sequence[int], sampling: Sampling) -> GenerationRequest:
        """A checked request."""
        self._check(prompt_ids, sampling)
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
        return self._generator.request(prompt_ids, sampling, seed=seed)

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        _check_sampling(sampling)
        needed = len(prompt_ids) + sampling.max_tokens
        if needed > self.served_window:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens and the reply up to {sampling.max_tokens}, "
                f"more than the {self.served_window} tokens of {self.public_name}'s window; lower `window`"
            )
        if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < self.vocab_size:
            raise EngineRefused(
                f"token ids of {self.public_name} are between 0 and {self.vocab_size - 1}"
            )

    async def _stream(
        self, request: GenerationRequest
    ) -> AsyncGenerator[StreamedToken | Completion, None]:
        items: asyncio.Queue[_Sampled | MemagentError] = asyncio.Queue()
        text = TextStream(self.decode, request.sampling.stop)
        self._submit(request, _StreamListener(asyncio.get_running_loop(), items))
        try:
            is_last = False
            while not is_last:
                item = await items.get()
                if isinstance(item, MemagentError):
                    raise item
                token_id, logprob, is_last = item
                certain = text.rest(self._text(request)) if is_last else text.add(token_id)
                yield StreamedToken(token_id=token_id, logprob=logprob, text=certain)
            yield self._completion(request)
        finally:
            if not request.finish_reason:
                self._cancel(request)

    def _submit(self, request: GenerationRequest, listener: _Listener) -> None:
        with self._changed:
            if self._is_closed:
                raise MachineError("the engine is closed")
            self._inbox.append(request)
            self._listeners[request] = listener
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="memagent-local", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def _cancel(self, request: GenerationRequest) -> None:
        request.is_cancelled = True  # the thread drops it before its next step
        self._listeners.pop(request, None)

    def _completion(self, request: GenerationRequest) -> Completion:
        num_cached = min(request.num_reused, len(request.prompt_ids))
        return Completion(
            text=self._text(request),
            finish_reason=request.finish_reason,
            usage=Usage(
                calls=1,
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=len(request.completion_ids),
                cached_tokens=num_cached,
            ),
            prompt_ids=tuple(request.prompt_ids),
            completion_ids=tuple(request.completion_ids),
            logprobs=tuple(request.logprobs),
            policy_version=min(version for version, _ in request.versions),
            token_versions=_token_versions(request),
        )

    # --- texts ---------------------------------------------------------------------------------

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation in the model's own chat template, ready for the reply."""
        return self.vocabulary.prompt_ids(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text without special tokens, as in a completion."""
        return self.vocabulary.decode(ids)

    def _text(self, request: GenerationRequest) -> str:
        text = self.decode(request.completion_ids)
        ends = [text.find(stop) for stop in request.sampling.stop if stop in text]
        return text[: min(ends)] if ends else text

    def _ends_text(self, request: GenerationRequest) -> bool:
        stops = request.sampling.stop
        if not stops:
            return False
        num_tokens = max(len(stop.encode()) for stop in stops) + STOP_MARGIN_TOKENS
        recent = self.decode(request.completion_ids[-num_tokens:])
        return any(stop in recent for stop in stops)

    # --- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        """Step while there is work; wait while there is none; return when closed."""
        if self._is_gpu:
            sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
        while self._take_requests():
            try:
                finished = self._generator.step()
            except BatchOutOfMemory as error:  # the others may need less
                self._fail(_out_of_memory(), error.requests)
                continue
            except Exception as error:  # no request may wait for a thread that has died
                self._is_broken = self._is_broken or is_gpu_failure(error)
                self._fail(_as_engine_error(error))
                continue
            for request in finished:
                if listener := self._listeners.pop(request, None):
                    listener.succeed(request)
        self._fail(MachineError("the engine was closed"))

    def _take_requests(self) -> bool:
        """Queue new requests, waiting for one if there is no other work; False when closed."""
        with self._changed:
            self._is_stepping = False
            self._changed.notify_all()
            while self._is_paused or not (
                self._inbox or self._generator.has_work or self._is_closed
            ):
                self._changed.wait()
            if self._wants_fresh:
                self._generator.forget()
                self._wants_fresh = False
            # under the lock: a request is always visible in the inbox or the scheduler
            for request in self._inbox:
                self._generator.scheduler.submit(request)
            self._inbox = []
            self._is_stepping = not self._is_closed
            return not self._is_closed

    @property
    def _is_paused(self) -> bool:
        return self._is_updating or (self._num_holds > 0 and not self._is_closed)

    def _forward(self, request: GenerationRequest, count: int) -> None:
        """Forward the newest tokens of a request to its listener."""
        if listener := self._listeners.get(request):
            listener.sampled(request, count)

    def _fail(
        self, error: EngineError, requests: Sequence[GenerationRequest] | None = None
    ) -> None:
        """Fail these requests, or all, each with an error of its own: one that is raised holds its frames."""
        for request in self._generator.abort(requests):
            if listener := self._listeners.pop(request, None):
                listener.fail(type(error)(str(error)))


_Sampled = tuple[int, float, bool]
"""Token id, its log-probability, and whether it is the last token of the reply."""


class _Listener(Protocol):
    """Receives the results of a request, in the engine's thread."""

    def sampled(self, request: GenerationRequest, count: int) -> None: ...

    def succeed(self, request: GenerationRequest) -> None: ...

    def fail(self, error: MemagentError) -> None: ...


class _ReplyListener:
    """Passes the whole reply to an event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[GenerationRequest]
    ) -> None:
        self._loop = loop
        self._done = done

    def sampled(self, request: GenerationRequest, count: int) -> None:
        """Single tokens are not needed."""

    def succeed(self, request: GenerationRequest) -> None:
        self._resolve(lambda: self._done.set_result(request))

    def fail(self, error: MemagentError) -> None:
        self._resolve(lambda: self._done.set_exception(error))

    def _resolve(self, act: Callable[[], None]) -> None:
        def if_still_waiting() -> None:
            if not self._done.done():
                act()

        _call(self._loop, if_still_waiting)


class _StreamListener:
    """Passes each token to an event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, items: asyncio.Queue[_Sampled | MemagentError]
    ) -> None:
        self._loop = loop
        self._items = items

    def sampled(self, request: GenerationRequest, count: int) -> None:
        newest = zip(request.completion_ids[-count:], request.logprobs[-count:], strict=True)
        for left, (token, logprob) in zip(range(count - 1, -1, -1), newest, strict=True):
            self._put((token, logprob, left == 0 and request.finish_reason is not None))

    def succeed(self, request: GenerationRequest) -> None:
        """The last token has already been marked as such."""

    def fail(self, error: MemagentError) -> None:
        self._put(error)

    def _put(self, item: _Sampled | MemagentError) -> None:
        _call(self._loop, lambda: self._items.put_nowait(item))


def _token_versions(request: GenerationRequest) -> tuple[int, ...] | None:
    """The version that sampled each token; None where it is the same for all."""
    if len(request.versions) == 1:
        return None
    return tuple(version for version, count in request.versions for _ in range(count))


def _call(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """Run a function in the loop of another thread; do nothing if the loop has closed."""
    with suppress(RuntimeError):  # it may close at any time
        loop.call_soon_threadsafe(act)


def _check_sampling(sampling: Sampling) -> None:
    """Refuse invalid values, naming the setting. NaN fails every comparison."""
    if sampling.max_tokens < 1:
        raise EngineRefused("max_tokens must be at least 1")
    if sampling.temperature is not None and not 0 <= sampling.temperature < float("inf"):
        raise EngineRefused(f"temperature must be 0 or more, not {sampling.temperature}")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise EngineRefused(f"top_p must be above 0 and at most 1, not {sampling.top_p}")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise EngineRefused(f"top_k must be at least 1, not {sampling.top_k}")
    stop: object = sampling.stop  # a plain str would be split into characters
    if not isinstance(stop, (tuple, list)) or not all(isinstance(text, str) for text in stop):
        raise EngineRefused(f"stop must be a tuple of texts, not {stop!r}")
    if "" in sampling.stop:
        raise EngineRefused("a stop text must not be empty")


def _checked_weights(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Each parameter with its new value, checked."""
    parameters = dict(
        model.named_parameters(remove_duplicate=False)
    )  # tied weights under both names
    pairs: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    for name, value in weights.items() if isinstance(weights, Mapping) else weights:
        if (parameter := parameters.get(name)) is None:
            near = nearest(name, parameters)
            suggestion = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"the model has no parameter {name!r}{suggestion}")
        if value.shape != parameter.shape:
            now, given = tuple(parameter.shape), tuple(value.shape)
            raise ConfigError(f"{name} has shape {now}, not {given}")
        if value.dtype != parameter.dtype:
            raise ConfigError(f"{name} is {parameter.dtype}, not {value.dtype}; convert it")
        pairs.append((parameter, value))
    if not pairs:
        raise ConfigError("no weights were given")
    return pairs


def _num_slots(loaded: LoadedModel, cache_gb: float) -> int:
    """How many tokens fit the cache; at least one whole window."""
    config = loaded.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    num_bytes = per_token * next(loaded.model.parameters()).element_size()
    return max(int(cache_gb * 2**30 / num_bytes), loaded.window)


@contextmanager
def _cache_errors(device: torch.device, cache_gb: float) -> Iterator[None]:
    """Name the setting to change where the cache does not fit the memory of a device."""
    too_large = ConfigError(
        f"a cache of {cache_gb:g} GB does not fit the memory of {device} beside the model; lower "
        "`cache_gb`"
    )
    if cache_gb * 2**30 > _memory_bytes(device):
        raise too_large  # Linux overcommits, and would kill the process later
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise too_large from None


def _half_free_gb(device: torch.device) -> float:
    """Half of the free memory of a GPU; the rest is for activations and a trainer."""
    return torch.cuda.mem_get_info(device)[0] / 2 / 2**30


def _memory_bytes(device: torch.device) -> float:
    """The total memory of a device; infinity if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _as_engine_error(error: Exception) -> EngineError:
    if is_out_of_memory(error):
        return _out_of_memory()
    kind = MachineError if is_gpu_failure(error) else EngineError
    return kind(f"the local model failed: {type(error).__name__}: {error}")


def _out_of_memory() -> MachineError:
    return MachineError("the model ran out of memory; lower `cache_gb`, `max_running` or `window`")


def is_gpu_failure(error: BaseException) -> bool:
    """Whether the GPU or its driver failed; in this process it stays so. Out of memory is no failure."""
    is_failure = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
    return is_failure and not is_out_of_memory(error)
