"""The engine of GGUF models on CPUs and Macs: llama.cpp in a process of its own.

    messages ──▶ our template and tokenizer ──▶ token ids ──▶ a slot ──▶ llama.cpp ──▶ ids, log-probabilities

A prompt goes to the slot that has computed its beginning last, after the calls that wait for that slot, so what
prompts share is computed once. The process is started by `launcher.py` with a random port and key. When it dies,
it is started again once for each call that was lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from memagent.config import EngineConfig, LocalConfig
from memagent.engines import store
from memagent.engines.balance import Balancer, prefix_keys
from memagent.engines.limit import Failure, Slots
from memagent.engines.llamacpp.__main__ import KEY_VARIABLE
from memagent.engines.llamacpp.adapters import adapter_file
from memagent.engines.local.gguf_files import GgufHeader, open_header
from memagent.engines.openai import EndpointEngine
from memagent.engines.yarn import yarn_settings
from memagent.errors import ConfigError, EngineError, MachineError, PromptTooLong
from memagent.launcher import Launch, Server, end_servers, start_servers
from memagent.tokens.tokenizers import ModelTokenizer
from memagent.types import Completion, EngineLoad, Message, Sampling, StreamedToken, Usage

CACHE_GB = 0.5
"""Memory for keys and values where the settings name none."""
LEAST_WINDOW = 8192
"""Tokens of a slot, even if they need more memory; fewer for a model whose window is smaller."""
SLOTS = 2
YARN = 2
"""Its number among the kinds of scaling."""
BATCH_TOKENS = 256
"""A call that is cancelled ends between two batches."""
SLACK = 16
"""Calls that may wait for one slot more than for another: a prompt takes longer than many replies."""
PREFIX_WIDTH = 8
"""Characters of a token where beginnings of prompts are compared: in blocks of 256 tokens."""
SPINS = "1000"
"""How often a thread looks for the others before it sleeps. OpenMP's own number stops a reading where another program takes a core."""
LOAD_SECONDS = 600.0
MAX_ATTEMPTS = 3
DEATH_SECONDS = 1.0
"""How long a server may take to end after its connections broke."""
REPLY_SECONDS = 7 * 86400.0
FINISH_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


def open_llama(model: str, config: LocalConfig) -> LlamaEngine:
    """Start llama.cpp with a model on this machine and wait until it answers."""
    path = store.locate(model)
    if not path.is_file():
        raise ConfigError(f"{path} is no GGUF file; use `runtime=torch`, or convert it")
    if config.adapter is None:
        store.check_is_whole(model)
    header = open_header(path)
    if not (header.folder / "chat_template.jinja").is_file():
        raise ConfigError(
            f"{path} has no chat template, so it cannot take messages; use the instruct version of the model"
        )
    parameters = plan_parameters(path, header, config)
    if config.adapter is not None:
        parameters["adapter"] = str(adapter_file(Path(config.adapter).expanduser(), path, header))
    return LlamaEngine(model, header, parameters)


def plan_parameters(path: Path, header: GgufHeader, config: LocalConfig) -> dict[str, Any]:
    """What the server is started with, by the machine, the model and the settings."""
    told = {"model_type": header.architecture, "max_position_embeddings": header.window}
    yarn = yarn_settings(told, window=config.yarn_window, factor=config.yarn_factor)
    window = yarn.window if yarn else header.window
    cache_gb = config.cache_gb or CACHE_GB
    cells = int(cache_gb * 2**30 / header.cache_bytes)
    num_slots = config.max_running or SLOTS
    window = min(window, max(cells // num_slots, LEAST_WINDOW))
    if config.max_running is None:
        num_slots = max(1, min(SLOTS, cells // window))
    batch = config.max_batch_tokens or BATCH_TOKENS
    threads = {"n_threads": num_cores()} if hasattr(os, "sched_getaffinity") else {}
    rope: dict[str, Any] = {}
    if yarn:
        rope = {"rope_scaling_type": YARN, "rope_freq_scale": 1 / yarn.factor}
        rope["yarn_orig_ctx"] = yarn.original_window
    return {
        "model.path": str(path),
        "n_ctx": window * num_slots,
        "n_parallel": num_slots,
        "n_batch": batch,
        "n_ubatch": batch,
        "cache_ram_mib": int(cache_gb * 512),  # for prompts that have left their slots
        "load_mode": 0,  # read, not mapped: weights are rearranged, and would be in memory twice
        "fit_params": False,
        "warmup": False,
        "ui": False,
        "verbosity": 1,
        "sse_ping_interval": 1,
        **rope,
        **({"n_gpu_layers": 0} if config.device == "cpu" else {}),
        **{f"{part}.{name}": n for part in ("cpuparams", "cpuparams_batch") for name, n in threads.items()},
    }  # fmt: skip


def num_cores() -> int:
    """Cores that this process may use, two threads of one counted once; OMP_NUM_THREADS says otherwise."""
    if (given := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        return max(int(given), 1)
    found = set()
    for cpu in os.sched_getaffinity(0):
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.add(file.read_text() if file.is_file() else str(cpu))
    return len(found)


class LlamaEngine(EndpointEngine):
    """A GGUF model in a llama.cpp server that this process started."""

    runs_here = True
    runtime = "llama.cpp"
    policy_version = 0

    def __init__(self, model: str, header: GgufHeader, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters
        self._key = secrets.token_urlsafe(24)
        self._starting = threading.Lock()
        self.server = self._start(port=0)
        num_slots = int(parameters["n_parallel"])
        super().__init__(
            EngineConfig.parse(
                {
                    "model": model,
                    "base_url": self.server.base_url.removesuffix("/v1"),
                    "api_key": self._key,
                    "timeout": REPLY_SECONDS,
                    "patience": 0,
                    "concurrency": num_slots,
                }
            )
        )
        self.serving = None
        self._read = _events
        self.tokenizer = str(header.folder)
        self.served_window: int = int(parameters["n_ctx"]) // num_slots
        self.reading_defaults = store.reading_defaults(model)
        self.calls_at_once = num_slots
        self.public_name = store.public_name(model)
        self.vocabulary = ModelTokenizer(header.folder, self.public_name)
        self._num_tokens: dict[object, int] = {}
        """Tokens of the calls in flight, prompt and reply."""
        self._balancer = Balancer(num_slots, slack=SLACK)
        self._salts: set[str | None] = set()
        """Whose prompts the server has: what it has computed is used while they are of one owner."""
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Slots]] = WeakKeyDictionary()

    @property
    def address(self) -> str:
        """What messages call the server."""
        return f"llama.cpp with {Path(self._parameters['model.path']).name}"

    @property
    def kept_address(self) -> None:
        """None: the next time it is another port."""

    @property
    def is_alive(self) -> bool:
        """True: a server that has died is started again."""
        return True

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        num_calls, num_slots = len(self._num_tokens), int(self._parameters["n_parallel"])
        return EngineLoad(
            num_running=min(num_calls, num_slots),
            num_waiting=max(num_calls - num_slots, 0),
            num_slots=int(self._parameters["n_ctx"]),
            num_used_slots=sum([*self._num_tokens.values()][:num_slots]),
        )

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation in the model's own chat template, ready for the reply."""
        return self.vocabulary.prompt_ids(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, without special tokens."""
        return self.vocabulary.decode(ids)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply to a conversation."""
        return await self.generate(await asyncio.to_thread(self.prompt_ids, messages), sampling)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One reply to a prompt of tokens. A call that is cancelled is not computed further."""
        self._check(prompt_ids, sampling)
        return await self._generate(prompt_ids, sampling, None)

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[StreamedToken | Completion, None]:
        """The tokens of one reply as they are sampled, and last the completion.

        An invalid request raises here, before the first token.
        """
        self._check(prompt_ids, sampling)
        return self._stream(prompt_ids, sampling)

    async def _stream(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[StreamedToken | Completion, None]:
        heard = _Heard()
        call = asyncio.ensure_future(self._generate(prompt_ids, sampling, heard))
        call.add_done_callback(lambda _: heard.tokens.put_nowait(None))
        try:
            while (token := await heard.tokens.get()) is not None:
                yield token
            yield call.result()
        finally:
            call.cancel()
            await asyncio.wait([call])

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        needed = len(prompt_ids) + sampling.max_tokens
        if needed > self.served_window:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens and the reply up to {sampling.max_tokens}, more "
                f"than the {self.served_window} tokens of {self.model}'s window; lower `window`, or raise `cache_gb`"
            )

    async def _generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, heard: _Heard | None
    ) -> Completion:
        was_restarted = False
        failure: Failure | None = None
        for _ in range(MAX_ATTEMPTS):
            server = self.server
            result = await self._in_slot(prompt_ids, sampling, heard)
            if isinstance(result, Completion):
                return result
            failure = result
            if failure.kind != "unreachable" or (heard and heard.num_events):
                break  # what was streamed cannot be taken back
            if not await asyncio.to_thread(server.ends_within, DEATH_SECONDS):
                continue  # the connection broke
            if was_restarted:
                raise MachineError(f"{server.why_ended()}; it had been started again for this call")
            await asyncio.to_thread(self._restart, server)
            was_restarted = True
        raise EngineError(f"{self.address} failed: {failure.reason if failure else 'no reply'}")

    async def drop_prompts(self, cache_salt: str | None) -> None:
        """Start the server again, which forgets all prompts; calls in flight are made again."""
        if cache_salt in self._salts:
            await asyncio.to_thread(self._restart, self.server)

    async def aclose(self) -> None:
        """Close the connections and end the server."""
        await super().aclose()
        await asyncio.to_thread(end_servers, [self.server])

    async def _in_slot(
        self, prompt_ids: Sequence[int], sampling: Sampling, heard: _Heard | None
    ) -> Completion | Failure:
        salt = sampling.cache_salt
        text = "".join(f"{token:{PREFIX_WIDTH}}" for token in prompt_ids)
        prefixes = prefix_keys([{"role": salt or "", "content": text}])
        number = self._balancer.choose(prefixes)
        assert number is not None, "no slot is ever set aside"
        self._balancer.begin(number, prefixes)
        call = object()
        self._num_tokens[call] = len(prompt_ids) + sampling.max_tokens
        try:
            new = [Slots(1) for _ in range(self.calls_at_once or 1)]
            async with self._turns.setdefault(asyncio.get_running_loop(), new)[number].slot():
                body = {
                    **_sampling_fields(sampling),
                    "prompt": list(prompt_ids),
                    "id_slot": number,
                    "cache_prompt": self._salts <= {salt},
                }
                self._salts.add(salt)
                return await self._post(
                    "/completion",
                    body,
                    lambda parts: _completion(parts, prompt_ids, sampling),
                    heard,
                )
        finally:
            del self._num_tokens[call]
            self._balancer.end(number)

    def _client(self) -> Any:
        client = super()._client()
        client.headers["Connection"] = "close"  # the server closes some that it says it keeps
        return client

    def _start(self, *, port: int) -> Server:
        parameters = json.dumps({**self._parameters, "port": port})
        launch = Launch(
            name=self.address,
            command=(sys.executable, "-P", "-m", "memagent.engines.llamacpp", parameters),
            api_key=self._key,
            log=Path(tempfile.gettempdir()) / f"memagent-llama-{secrets.token_hex(8)}.log",
            keeps_log=False,
            environment={"GOMP_SPINCOUNT": SPINS, **os.environ, KEY_VARIABLE: self._key},
        )
        return start_servers([launch], seconds=LOAD_SECONDS)[0]

    def _restart(self, dead: Server) -> None:
        """Start the server again at the same port, unless another call has done so."""
        with self._starting:
            if self.server is dead:
                end_servers([dead])
                self._salts.clear()
                self.server = self._start(port=dead.port)


class _Heard:
    """What has arrived of a streamed reply."""

    def __init__(self) -> None:
        self.tokens: asyncio.Queue[StreamedToken | None] = asyncio.Queue()
        self.num_events = 0
        self._line = b""

    def __call__(self, part: bytes) -> None:
        *lines, self._line = (self._line + part).split(b"\n")
        for line in lines:
            event = json.loads(line[6:]) if line.startswith(b"data: ") else {}
            if "content" in event and "prompt_progress" not in event:
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        self.num_events += 1
        logprobs = [one["logprob"] for one in event.get("completion_probabilities", ())]
        sampled = [*zip(event.get("tokens", ()), logprobs, strict=False)]
        *others, (token, logprob) = sampled or [(None, None)]
        for one in others:
            self.tokens.put_nowait(StreamedToken(token_id=one[0], logprob=one[1], text=""))
        text = event["content"]
        self.tokens.put_nowait(StreamedToken(token_id=token, logprob=logprob, text=text))


def _events(reply: bytes) -> Any:
    """The events of a stream: the last one alone if it is an error."""
    events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith(b"data: ")]
    return events[-1] if events and "error" in events[-1] else events


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """As the engine in torch samples: greedily where nothing else is set."""
    return {
        "n_predict": sampling.max_tokens,
        "temperature": sampling.temperature or 0.0,
        "top_k": sampling.top_k or 0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "min_p": 0.0,
        "samplers": ["temperature", "top_k", "top_p"],
        "stop": list(sampling.stop),
        "n_probs": 1,
        "return_tokens": True,
        "stream": True,
        "return_progress": True,
        **({} if sampling.seed is None else {"seed": sampling.seed % 2**32}),
    }


def _completion(events: Any, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
    """The completion in the events of a stream. Raises ValueError where they end too early."""
    if not events or not events[-1].get("stop"):
        raise ValueError("the reply ends too early")
    last = events[-1]
    sampled = [event for event in events if "prompt_progress" not in event]
    ids = tuple(token for event in sampled for token in event.get("tokens", ()))
    logprobs = [
        entry["logprob"] for event in sampled for entry in event.get("completion_probabilities", ())
    ]
    num_tokens = int(last["tokens_predicted"])
    # tokens that end within a character are not reported, and there is no number for NaN
    is_whole = len(ids) == len(logprobs) == num_tokens and None not in logprobs
    # log-probabilities are those of the model's own distribution
    is_own = (
        (sampling.temperature or 1.0) == 1.0
        and sampling.top_k is None
        and sampling.top_p in (None, 1.0)
    )
    return Completion(
        text="".join(event.get("content", "") for event in sampled),
        finish_reason=FINISH_REASONS.get(last["stop_type"]),
        usage=Usage(
            calls=1,
            prompt_tokens=len(prompt_ids),
            completion_tokens=num_tokens,
            cached_tokens=min(last["timings"]["cache_n"], len(prompt_ids)),
        ),
        prompt_ids=tuple(prompt_ids),
        completion_ids=ids if is_whole else None,
        logprobs=tuple(map(float, logprobs)) if is_whole and is_own else None,
    )
