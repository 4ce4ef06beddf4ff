"""The embedded engine: a model in this process, generating for many requests at once.

A thread of its own runs the generator; requests come in from any event loop and their replies go back
to it. Weights are the model's own parameters: whoever holds the model may change them while nothing is
running, and calls `weights_changed`.

    async with open_engine("local:./my-model") as engine:
        completion = await engine.complete(messages, Sampling(max_tokens=100))
        completion.completion_ids, completion.logprobs, completion.policy_version
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memagent.config import LocalConfig
from memagent.engines.base import BaseEngine
from memagent.engines.local.generator import Generator
from memagent.engines.local.loading import LoadedModel, load
from memagent.engines.local.scheduler import Request
from memagent.errors import ConfigError, EngineError, EngineRefused, MemagentError
from memagent.types import Completion, Message, Sampling, Usage

SEED_BITS = 63
STOP_MARGIN_TOKENS = 8
"""A stop text is looked for in the last tokens: at most one per character, and a few more."""


def open_local(model: str, **settings: Any) -> LocalEngine:
    """An engine for a model on this machine: a pulled one by name, a folder, or a GGUF file."""
    if not model:
        raise ConfigError("say which model: local:NAME, or local:PATH of a folder or GGUF file")
    config = LocalConfig.parse(settings)
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return LocalEngine(load(model, adapter=config.adapter, device=device), config)


class LocalEngine(BaseEngine):
    """A model in this process."""

    def __init__(self, loaded: LoadedModel, config: LocalConfig | None = None) -> None:
        config = config or LocalConfig()
        self.model = loaded.name
        self.tokenizer = str(loaded.tokenizer_folder)
        self.served_window: int = loaded.window
        self._loaded = loaded
        self._generator = Generator(
            loaded.model,
            num_slots=_num_slots(loaded, config.cache_gb),
            eos_ids=loaded.eos_ids,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            ends_text=self._ends_text,
        )
        self._listeners: dict[Request, _Listener] = {}
        self._inbox: list[Request] = []
        """Requests that came in during a step; the thread takes them before the next."""
        self._changed = threading.Condition()
        """Guards inbox and flags, never held during a step: a caller's event loop must not wait."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def policy_version(self) -> int:
        """How often the weights have changed since the engine was opened."""
        return self._generator.policy_version

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply to a conversation, in the model's own chat template."""
        return await self.generate(self._prompt_ids(messages), sampling)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One reply to a prompt of tokens. Cancelling the call frees what it holds."""
        self._check(prompt_ids, sampling)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Request] = loop.create_future()
        request = self._submit(prompt_ids, sampling, _Listener(loop, done))
        try:
            await done
        except asyncio.CancelledError:
            self._cancel(request)
            raise
        return self._completion(request)

    def weights_changed(self) -> None:
        """Say that the model's parameters have changed; nothing may be running."""
        with self._changed:
            if self._inbox:
                raise ConfigError("the weights can only change while no request is running")
            self._generator.weights_changed()

    async def aclose(self) -> None:
        """Stop the thread; what is still running fails."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    # --- requests ------------------------------------------------------------------------------

    def _prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        given = [{"role": message["role"], "content": message["content"]} for message in messages]
        try:
            text = self._loaded.tokenizer.apply_chat_template(
                given, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever the template raises: it is the model's own program
            raise EngineRefused(
                f"the model's chat template refuses these messages: {error}"
            ) from None
        ids: list[int] = self._loaded.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if sampling.max_tokens < 1:
            raise EngineRefused("max_tokens must be at least 1")
        needed = len(prompt_ids) + sampling.max_tokens
        if needed > self.served_window:
            raise EngineRefused(
                f"the prompt has {len(prompt_ids)} tokens and the reply up to {sampling.max_tokens}, "
                f"more than the {self.served_window} that {self.model} can see; lower --window to its own"
            )

    def _submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: _Listener
    ) -> Request:
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
        request = self._generator.request(prompt_ids, sampling, seed=seed)
        with self._changed:
            if self._is_closed:
                raise EngineError("the engine is closed")
            self._inbox.append(request)
            self._listeners[request] = listener
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="memagent-local", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return request

    def _cancel(self, request: Request) -> None:
        request.is_cancelled = True  # the thread drops it before its next step
        self._listeners.pop(request, None)

    def _completion(self, request: Request) -> Completion:
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
            policy_version=self.policy_version,
        )

    # --- texts ---------------------------------------------------------------------------------

    def _text(self, request: Request) -> str:
        text = self._decode(request.completion_ids)
        ends = [text.find(stop) for stop in request.sampling.stop if stop in text]
        return text[: min(ends)] if ends else text

    def _ends_text(self, request: Request) -> bool:
        stops = request.sampling.stop
        if not stops:
            return False
        num_tokens = max(map(len, stops)) + STOP_MARGIN_TOKENS
        recent = self._decode(request.completion_ids[-num_tokens:])
        return any(stop in recent for stop in stops)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._loaded.tokenizer.decode(list(ids), skip_special_tokens=True))

    # --- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        """Step as long as there is work; wait while there is none; end when closed."""
        while self._take_requests():
            try:
                finished = self._generator.step()
            except Exception as error:  # a request must never wait for a thread that died
                self._fail(_as_engine_error(error))
                continue
            for request in finished:
                if listener := self._listeners.pop(request, None):
                    listener.succeed(request)
        self._fail(EngineError("the engine was closed"))

    def _take_requests(self) -> bool:
        """Put new requests in line, waiting for one if there is nothing else to do; False to end."""
        with self._changed:
            while not (self._inbox or self._generator.has_work or self._is_closed):
                self._changed.wait()
            inbox, self._inbox = self._inbox, []
            is_closed = self._is_closed
        for request in inbox:
            self._generator.scheduler.submit(request)
        return not is_closed

    def _fail(self, error: MemagentError) -> None:
        for request in self._generator.abort():
            if listener := self._listeners.pop(request, None):
                listener.fail(error)


class _Listener:
    """Who waits for a request, in which event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[Request]) -> None:
        self._loop = loop
        self._done = done

    def succeed(self, request: Request) -> None:
        self._tell(lambda: self._done.set_result(request))

    def fail(self, error: MemagentError) -> None:
        self._tell(lambda: self._done.set_exception(error))

    def _tell(self, act: Callable[[], None]) -> None:
        def if_still_waiting() -> None:
            if not self._done.done():
                act()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(if_still_waiting)


def _num_slots(loaded: LoadedModel, cache_gb: float) -> int:
    """How many tokens fit the memory for keys and values; at least one whole window."""
    config = loaded.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    num_bytes = per_token * next(loaded.model.parameters()).element_size()
    return max(int(cache_gb * 2**30 / num_bytes), loaded.window)


def _as_engine_error(error: Exception) -> MemagentError:
    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
        return EngineError("the model ran out of memory; lower cache_gb, max_running or the window")
    return EngineError(f"the local model failed: {type(error).__name__}: {error}")
