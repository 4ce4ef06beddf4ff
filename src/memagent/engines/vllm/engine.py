"""The vLLM engine: start vLLM on the GPUs of this machine, call it, and shut it down.

    vllm:MODEL ──▶ GPU 0 1 ──▶ watchdog ──▶ vLLM on a free port ──┐
                   GPU 2 3 ──▶ watchdog ──▶ vLLM on a free port ──┴──▶ balanced ──▶ complete

    with open_engine("vllm:Qwen/Qwen2.5-7B-Instruct", tensor_parallel_size=2) as engine:
        Reader(engine).ask(question, document)

New weights do not wait for replies in progress: those go on with the new ones, see `continuing.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from memagent.config import EngineConfig, VllmConfig
from memagent.engines.balance import BalancedEngine, prefix_keys
from memagent.engines.limit import Failure, RetryListener
from memagent.engines.openai import EndpointEngine, parse_completion
from memagent.engines.vllm.servers import CONTROL_VARIABLE, plan_launches
from memagent.errors import ConfigError, EngineError, MachineError
from memagent.launcher import Server, end_servers, start_servers
from memagent.types import Completion, Message, Sampling, Usage

CONCURRENCY_PER_SERVER = 64
NOT_OURS = ("model", "base_url", "api_key", "api_version")
"""Settings of an endpoint that is started elsewhere."""
EXACT_TOKENS = {"return_token_ids": True, "logprobs": True}
CONTROL_VARIABLES = {CONTROL_VARIABLE: "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
"""Variables of a server whose weights change: its routes for that are not there without them."""
HANDLE_VARIABLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Variables of a server that gets handles of GPU memory, which are pickled: who has its key can run code in it."""
SETTLE_SECONDS = 1.0
"""After vLLM has ended the replies in progress, how long they may take to arrive."""


def open_vllm(model: str, **settings: Any) -> VllmEngine:
    """Start vLLM for a model and wait until it answers; the engine ends it when it is closed."""
    if not model:
        raise ConfigError("say which model: vllm:HUB_ID, or vllm:PATH of a Hugging Face folder")
    for name in NOT_OURS:
        if settings.get(name) is not None:
            raise ConfigError(
                f"`{name}` does not go with vllm:{model}, which starts its own server; for one "
                f"that runs already use openai:{model}"
            )
    names = set(VllmConfig.model_fields)
    config = VllmConfig.parse({n: value for n, value in settings.items() if n in names})
    calls = EngineConfig.parse({n: value for n, value in settings.items() if n not in names})
    launches = plan_launches(model, config, environment=os.environ)
    servers = start_servers(launches, seconds=config.start_seconds)
    try:
        return VllmEngine(servers, _endpoint_config(model, config, calls, servers))
    except BaseException:
        end_servers(servers)
        raise


def _endpoint_config(
    model: str, config: VllmConfig, calls: EngineConfig, servers: Sequence[Server]
) -> EngineConfig:
    """How the servers are called: as the user says, with what only we know."""
    given = calls.model_dump(exclude_unset=True)
    extra_body = {**(EXACT_TOKENS if config.token_ids else {}), **(calls.extra_body or {})}
    return EngineConfig.parse(
        {
            "concurrency": CONCURRENCY_PER_SERVER * len(servers),
            **given,
            "model": model,
            "base_url": ",".join(server.base_url for server in servers),
            "api_key": servers[0].launch.api_key,
            "extra_body": extra_body or None,
        }
    )


class VllmEngine(BalancedEngine):
    """vLLM servers that this process started."""

    def __init__(
        self, servers: Sequence[Server], config: EngineConfig, on_retry: RetryListener | None = None
    ) -> None:
        super().__init__(config, on_retry)
        self._may_call = asyncio.Event()
        """Not set while the weights change."""
        self._may_call.set()
        self._sent: set[asyncio.Future[Completion | Failure]] = set()
        """Requests that are at a server."""
        self._has_transfer = False
        """Whether the weight transfer of the servers is initialised."""
        self.servers = tuple(servers)
        for endpoint, server in zip(self.endpoints, self.servers, strict=True):
            endpoint._learn(server.models())
        self._check_alike(self.endpoints)
        self.tokenizer = self.endpoints[0].tokenizer
        self.served_window = self.endpoints[0].served_window

    @property
    def kept_address(self) -> None:
        """None: the next time it is another port."""

    @property
    def is_alive(self) -> bool:
        """Whether a server is left."""
        return any(server.is_running for server in self.servers)

    async def load_weights(self, folder: Path, policy_version: int) -> None:
        """Have every server load the safetensors files of a folder in place of its weights.

        Replies in progress go on with the new weights; calls that arrive meanwhile wait.
        The servers need `CONTROL_VARIABLES` in their environment.
        """
        async with self._changing_weights(policy_version):
            path = {"weights_path": str(folder)}
            await self._control("/collective_rpc", {"method": "reload_weights", "kwargs": path})

    async def update_weights(
        self, updates: AsyncIterator[Mapping[str, Any]], policy_version: int
    ) -> None:
        """Have every server take weights through vLLM's transfer engine "ipc", one request after the other.

        Otherwise as `load_weights`. The servers need `HANDLE_VARIABLES`, too. After an error they are of no use.
        """
        async with self._changing_weights(policy_version):
            if not self._has_transfer:
                await self._control("/init_weight_transfer_engine", {"init_info": {"packed": True}})
                self._has_transfer = True
            await self._control("/start_weight_update")
            async for update in updates:
                await self._control("/update_weights", {"update_info": dict(update)})
            await self._control("/finish_weight_update")

    @asynccontextmanager
    async def _changing_weights(self, policy_version: int) -> AsyncIterator[None]:
        """Pause the servers for new weights, and have them resume."""
        self._may_call.clear()
        try:
            await self._control("/pause?mode=abort")
            if self._sent:  # what does not arrive in time is in vLLM's queue, and is made again
                _, queued = await asyncio.wait(self._sent, timeout=SETTLE_SECONDS)
                for request in queued:
                    request.cancel()
            yield
            await self._control("/reset_prefix_cache")
            await self._control("/resume")
            self.switch_model(self.model, policy_version)
        finally:
            self._may_call.set()

    async def sleep(self) -> None:
        """Have every server free its GPU memory; weights are kept in the CPU's. No call may be in progress."""
        await self._control("/sleep?level=1&mode=wait")

    async def wake(self) -> None:
        """Have every server take its GPU memory again."""
        await self._control("/wake_up")

    async def _control(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Post to all servers, outside of the API that clients see."""

        async def ask(endpoint: EndpointEngine) -> None:
            root = (endpoint.config.base_url or "").removesuffix("/v1")
            answer = await endpoint.post(f"{root}{path}", body or {})
            if answer.status != 200:
                raise EngineError(
                    f"vLLM refuses {path.partition('?')[0]} (HTTP {answer.status}: {answer.text})"
                )

        await asyncio.gather(*map(ask, self.endpoints))

    async def aclose(self) -> None:
        """Close the connections and end the servers."""
        await super().aclose()
        await asyncio.to_thread(end_servers, self.servers)

    async def _attempt(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> Completion | Failure:
        """As for any endpoints, but a reply that new weights cut short goes on with them."""
        prefixes = prefix_keys(messages)
        parts: list[Completion] = []

        def ask(endpoint: EndpointEngine) -> Awaitable[Completion | Failure]:
            if parts:
                return continue_reply(endpoint, messages, sampling, parts)
            return endpoint._attempt(messages, sampling)

        while True:
            result = await self._over_endpoints(
                prefixes, lambda endpoint: self._send(lambda: ask(endpoint))
            )
            if not isinstance(result, Completion):
                return result
            if result.finish_reason != ABORTED:
                return joined([*parts, result]) if parts else result
            if can_continue(result, sampling):
                parts.append(result)

    async def _send(
        self, call: Callable[[], Awaitable[Completion | Failure]]
    ) -> Completion | Failure:
        """Make a request while the weights do not change. One that was not begun when they did is made again."""
        while True:
            await self._may_call.wait()
            if not self.is_alive:  # there is nothing to wait for
                raise MachineError(self.servers[0].why_ended())
            request = asyncio.ensure_future(call())
            self._sent.add(request)
            try:
                await asyncio.wait([request])
            finally:
                self._sent.discard(request)
                request.cancel()  # no effect on one that has ended
            if not request.cancelled():
                return request.result()


# --- replies that go on over new weights ----------------------------------------------------------

#     first half, version 4 ──▶ vLLM aborts it for new weights ──▶ prompt + first half ──▶ rest, version 5
#                                                                                        └──▶ joined
# vLLM is asked for the rest with the tokens so far as the prompt, so that the reply continues exactly those. It
# computes them again, on the new weights.


ABORTED = "abort"
"""Why vLLM ended a reply that was cut short."""


def can_continue(part: Completion, sampling: Sampling) -> bool:
    """Whether the rest of a reply can be sampled so that it is as if it had never been cut.

    Not where a stop string may have begun: vLLM would not see it in the rest.
    """
    has_tokens = bool(part.prompt_ids and part.completion_ids)
    heads = (stop[:end] for stop in sampling.stop for end in range(1, len(stop)))
    return has_tokens and part.reasoning is None and not part.text.endswith(tuple(heads))


async def continue_reply(
    endpoint: EndpointEngine,
    messages: Sequence[Message],
    sampling: Sampling,
    parts: Sequence[Completion],
) -> Completion | Failure:
    """One request for what comes after the parts of a reply."""
    body = endpoint._body([], _rest(sampling, parts))
    del body["messages"]
    body["prompt"] = [*(parts[0].prompt_ids or ()), *_ids(parts)]
    if body.get("logprobs"):
        body["logprobs"] = 0  # as many as each token has besides the sampled one
    version, shield = endpoint._policy_version, endpoint._shielded(messages)
    result = await endpoint._post("/completions", body, parse_continuation)
    if isinstance(result, Failure):
        return result
    return replace(result, text=shield.restored(result.text), policy_version=version)


def joined(parts: Sequence[Completion]) -> Completion:
    """The parts of a reply as one, with the version of each token where they differ."""
    first, last = parts[0], parts[-1]
    versions = tuple(part.policy_version or 0 for part in parts for _ in part.completion_ids or ())
    is_mixed = len(set(versions)) > 1
    has_logprobs = all(part.logprobs is not None for part in parts)
    return replace(
        last,
        text="".join(part.text for part in parts),
        usage=_usage(parts),
        prompt_ids=first.prompt_ids,
        completion_ids=_ids(parts),
        logprobs=tuple(one for part in parts for one in part.logprobs or ())
        if has_logprobs
        else None,
        policy_version=min(versions) if is_mixed else first.policy_version,
        token_versions=versions if is_mixed else None,
    )


def parse_continuation(data: Any) -> Completion:
    """The completion in a reply to a prompt of tokens. Raises ValueError with the reason when there is none."""
    try:
        choice = data["choices"][0]
        message = {"content": choice["text"]}
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        entries = {"content": [{"logprob": one} for one in logprobs]}
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("no text in it") from None
    return parse_completion(
        {**data, "choices": [{**choice, "message": message, "logprobs": entries}]}
    )


def _rest(sampling: Sampling, parts: Sequence[Completion]) -> Sampling:
    """As many tokens as are left, with other random numbers than those of the parts."""
    num_tokens = len(_ids(parts))
    seed = sampling.seed
    if seed is not None:
        digest = blake2b(f"{seed}:{num_tokens}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "big") >> 1
    return replace(sampling, max_tokens=sampling.max_tokens - num_tokens, seed=seed)


def _ids(parts: Sequence[Completion]) -> tuple[int, ...]:
    return tuple(token for part in parts for token in part.completion_ids or ())


def _usage(parts: Sequence[Completion]) -> Usage | None:
    """The usage of one call: tokens that were computed again on new weights do not count."""
    usages = [part.usage for part in parts if part.usage is not None]
    if len(usages) < len(parts):
        return None
    return replace(usages[0], completion_tokens=sum(one.completion_tokens for one in usages))
