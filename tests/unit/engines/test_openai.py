"""The endpoint engine: where it is, what it sends, what it does when things go wrong."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from memagent.config import EngineConfig
from memagent.engines.addresses import OPENAI_URL, endpoint_from, origins, public_url
from memagent.engines.limit import Failure
from memagent.engines.openai import EndpointEngine, _certificates, open_endpoint, parse_completion
from memagent.errors import ConfigError, EngineError, EngineRefused, PromptTooLong
from memagent.tokens.tokenizers import tokenizer_for_model
from memagent.types import Sampling, Usage
from tests.support.handlers import Handler, listening
from tests.support.loopback import Endpoint, running

MESSAGES = [{"role": "user", "content": 'What is the code of "amber"?'}]
SAMPLING = Sampling(max_tokens=50)


def engine_at(base_url: str, **settings: Any) -> EndpointEngine:
    given = {"model": "test-model", "base_url": base_url, "patience": 5, **settings}
    return EndpointEngine(EngineConfig.parse(given))


async def complete(engine: EndpointEngine, **sampling: Any):  # type: ignore[no-untyped-def]
    async with engine:
        return await engine.complete(MESSAGES, Sampling(**{"max_tokens": 50, **sampling}))


@pytest.mark.parametrize(
    ("base_url", "reads_them"),
    [("http://a/v1,http://b/v1", False), ("http://a/v1,https://b/v1", True), (None, True)],
)
def test_certificates_are_read_where_a_host_needs_them_and_always_demanded(
    base_url: str | None, reads_them: bool
) -> None:
    context = _certificates(origins(base_url or OPENAI_URL))
    assert (context.cert_store_stats()["x509_ca"] > 0) == reads_them
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


class TestAddress:
    PAIRS: ClassVar = {
        "MEMAGENT_BASE_URL": "http://m",
        "MEMAGENT_API_KEY": "key-m",
        "OPENAI_BASE_URL": "http://o",
        "OPENAI_API_KEY": "key-o",
        "URL": "http://u",
        "API_KEY": "key-u",
    }

    def test_memagents_own_variables_come_first(self) -> None:
        assert endpoint_from(self.PAIRS) == ("http://m", "key-m")

    def test_then_openais_and_never_the_generic_ones(self) -> None:
        openai = {name: value for name, value in self.PAIRS.items() if "MEMAGENT" not in name}
        assert endpoint_from(openai) == ("http://o", "key-o")
        assert endpoint_from({"URL": "http://u", "API_KEY": "key-u"}) == (None, None)

    def test_what_is_given_wins(self) -> None:
        assert endpoint_from(self.PAIRS, "http://x", "key-x") == ("http://x", "key-x")

    @pytest.mark.parametrize(
        "url",
        ["http://x", "http://m:81", "https://m", "http://m.x", "http://m,http://x", "http://["],
    )
    def test_a_key_is_not_sent_to_a_host_it_was_not_set_for(self, url: str) -> None:
        assert endpoint_from(self.PAIRS, url) == (url, None)

    def test_an_address_given_again_finds_the_key_that_belongs_to_its_host(self) -> None:
        assert endpoint_from(self.PAIRS, "http://m:80/v1").api_key == "key-m"
        assert endpoint_from(self.PAIRS, "http://o/v1").api_key == "key-o"
        assert endpoint_from(self.PAIRS, "http://u") == ("http://u", "key-u")

    def test_our_key_without_an_address_is_for_the_endpoint_that_is_named(self) -> None:
        assert endpoint_from({"MEMAGENT_API_KEY": "key-m"}, "http://x").api_key == "key-m"

    def test_openais_key_is_for_openai(self) -> None:
        environment = {"OPENAI_API_KEY": "key-o", "API_KEY": "key-u"}
        assert endpoint_from(environment) == (None, "key-o")
        assert endpoint_from(environment, "https://api.openai.com/v1").api_key == "key-o"
        assert endpoint_from(environment, "https://api.openai.com.x/v1").api_key is None

    def test_without_address_and_key_the_error_says_what_to_set(self) -> None:
        with pytest.raises(ConfigError, match="MEMAGENT_BASE_URL"):
            open_endpoint("m")

    @pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "v1"])
    def test_what_is_no_address_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match="no endpoint address"):
            open_endpoint("m", base_url=url)

    def test_a_shown_address_holds_no_credentials(self) -> None:
        shown = public_url("https://user:secret@host:8443/v1?key=secret")
        assert shown == "https://host:8443/v1"


class TestParsing:
    def test_a_usual_reply(self) -> None:
        data = {
            "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": 7,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        }
        completion = parse_completion(data)
        assert completion.text == "hi"
        assert completion.finish_reason == "stop"
        assert completion.usage == Usage(
            calls=1, prompt_tokens=7, completion_tokens=2, cached_tokens=4
        )

    def test_reasoning_apart_from_the_text_is_kept(self) -> None:
        message = {"content": None, "reasoning_content": "hm"}
        completion = parse_completion({"choices": [{"message": message}]})
        assert (completion.text, completion.reasoning, completion.usage) == ("", "hm", None)

    def test_content_in_parts_is_joined(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert parse_completion({"choices": [{"message": {"content": parts}}]}).text == "ab"

    def test_halves_of_characters_are_replaced(self) -> None:
        data = json.loads('{"choices": [{"message": {"content": "x\\ud83d"}}]}')
        assert parse_completion(data).text == "x?"

    @pytest.mark.parametrize(
        "data", ["<html>", None, [], {}, {"choices": []}, {"choices": [{}]}, {"choices": None}]
    )
    def test_what_holds_no_message_is_invalid(self, data: Any) -> None:
        with pytest.raises(ValueError, match=r"broken JSON|no message"):
            parse_completion(data)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with running(tmp_path_factory.mktemp("loopback") / "log", reply="echo") as endpoint:
        yield endpoint


class TestCalls:
    async def test_a_reply_comes_with_its_usage(self, endpoint: Endpoint) -> None:
        completion = await complete(engine_at(endpoint.base_url))
        assert len(completion.text) > 50
        assert completion.usage is not None
        assert completion.usage.calls == 1
        assert completion.num_attempts == 1

    def test_an_engine_serves_one_event_loop_after_the_other(self, endpoint: Endpoint) -> None:
        engine = engine_at(endpoint.base_url)
        first = asyncio.run(complete(engine))
        assert asyncio.run(complete(engine)).text == first.text

    async def test_no_more_requests_are_under_way_than_allowed(self, tmp_path: Path) -> None:
        with running(tmp_path / "log", latency_ms=20) as slow:
            async with engine_at(slow.base_url, concurrency=3) as engine:
                await asyncio.gather(*(engine.complete(MESSAGES, SAMPLING) for _ in range(12)))
            assert max(call["inflight"] for call in slow.calls()) == 3

    async def test_an_azure_deployment_gets_its_path_version_and_header(
        self, endpoint: Endpoint
    ) -> None:
        url = f"{endpoint.root_url}/openai/deployments/test-model"
        engine = engine_at(url, model="", api_key="secret-key", api_version="2024-06-01")
        assert engine.model == "test-model"  # the deployment's name stands in the address
        await complete(engine)
        call = endpoint.calls()[-1]
        assert call["path"] == (
            "/openai/deployments/test-model/chat/completions?api-version=2024-06-01"
        )
        assert call["auth"] == "api-key"

    async def test_an_unknown_model_names_the_served_ones(self, endpoint: Endpoint) -> None:
        with pytest.raises(EngineRefused, match="`model` with one of: test-model"):
            await complete(engine_at(endpoint.base_url, model="nope"))

    async def test_inspecting_finds_the_only_model_its_tokenizer_and_window(
        self, tmp_path: Path
    ) -> None:
        folder = tmp_path / "base"
        folder.mkdir()
        with running(tmp_path / "log", root=str(folder), max_model_len=4096) as served:
            async with engine_at(served.base_url, model="") as engine:
                await engine.inspect()
        assert (engine.model, engine.tokenizer, engine.served_window) == (
            "test-model",
            str(folder),
            4096,
        )

    def test_a_server_elsewhere_names_no_folder_of_this_machine(self, tmp_path: Path) -> None:
        for address, opened in (
            ("http://203.0.113.7/v1", "mine"),
            ("http://localhost.evil.example/v1", "mine"),
            ("http://127.0.0.1:8000/v1,http://203.0.113.7/v1", "mine"),
            ("http://localhost:8000/v1", str(tmp_path)),
        ):
            engine = engine_at(address, model="mine")
            engine._learn([{"id": "mine", "root": str(tmp_path)}])
            assert engine.tokenizer == opened

    def test_nothing_is_fetched_that_only_the_server_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        for named, root, opened in (
            ("org/mine", "org/other", "org/mine"),
            ("org/mine", "gpt-4o", "org/mine"),
            ("", "org/other", ""),
            ("", "org/served", ""),
            ("org/served", "org/served", "org/served"),
        ):
            engine = engine_at("http://localhost:8000/v1", model=named)
            engine._learn([{"id": named or "org/served", "root": root}])
            assert (engine.model, engine.tokenizer) == (named or "org/served", opened)
        tokenizer, reason = tokenizer_for_model("")
        assert (tokenizer.name, tokenizer.is_exact) == ("estimate", False)
        assert "name one with `tokenizer`" in (reason or "")

    async def test_without_a_model_no_call_leaves(self, endpoint: Endpoint) -> None:
        with pytest.raises(ConfigError, match="no model is chosen"):
            await complete(engine_at(endpoint.base_url, model=""))

    async def test_a_refused_key_is_not_repeated_in_the_error(self, tmp_path: Path) -> None:
        with running(tmp_path / "log", api_key="right") as guarded:
            with pytest.raises(EngineRefused, match="refused the key") as caught:
                await complete(engine_at(guarded.base_url, api_key="sk-wrong-key"))
            assert "sk-wrong-key" not in str(caught.value)
            assert len(guarded.calls()) == 1

    async def test_a_prompt_too_long_says_to_lower_the_window(self, tmp_path: Path) -> None:
        with (
            running(tmp_path / "log", context_window=2) as small,
            pytest.raises(EngineRefused, match="a smaller `window`"),
        ):
            await complete(engine_at(small.base_url))


class TestFailures:
    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            ("500", "HTTP 500"),
            ("429", "HTTP 429"),
            ("malformed", "not valid"),
            ("reset", ""),
            ("cut", ""),
        ],
    )
    async def test_what_may_pass_is_tried_again(
        self, tmp_path: Path, fault: str, reason: str
    ) -> None:
        heard: list[Failure] = []
        with running(tmp_path / "log", faults=f"{fault}=0.5", seed=1, retry_after=0.05) as faulty:
            async with engine_at(faulty.base_url) as engine:
                engine.on_retry = lambda failure, delay: heard.append(failure)
                for _ in range(6):
                    assert (await engine.complete(MESSAGES, SAMPLING)).text
            outcomes = [call["outcome"] for call in faulty.calls()]
        assert outcomes.count("ok") == 6
        assert outcomes.count(fault) == len(heard) > 0
        assert all(reason in failure.reason for failure in heard)

    async def test_a_stall_ends_at_the_timeout(self, tmp_path: Path) -> None:
        with running(tmp_path / "log", faults="stall=0.5", seed=3, stall_seconds=30) as faulty:
            engine = engine_at(faulty.base_url, timeout=0.2)
            completions = [await complete(engine) for _ in range(4)]
            outcomes = [call["outcome"] for call in faulty.calls()]
        assert outcomes.count("stall") == sum(c.num_attempts - 1 for c in completions) > 0

    async def test_patience_ends(self, tmp_path: Path) -> None:
        with (
            running(tmp_path / "log", faults="500=1.0") as broken,
            pytest.raises(EngineError, match=r"failed for .* s \(\d+ attempts\): HTTP 500"),
        ):
            await complete(engine_at(broken.base_url, patience=0.5))

    async def test_no_patience_is_one_attempt(self, tmp_path: Path) -> None:
        with running(tmp_path / "log", faults="500=1.0") as broken:
            with pytest.raises(EngineError, match="1 attempt"):
                await complete(engine_at(broken.base_url, patience=0))
            assert len(broken.calls()) == 1

    async def test_a_wait_longer_than_patience_is_not_begun(self, tmp_path: Path) -> None:
        with (
            running(tmp_path / "log", faults="429=1.0", retry_after=3600) as busy,
            pytest.raises(EngineError, match="asks to wait 3600 s"),
        ):
            await complete(engine_at(busy.base_url))


@pytest.mark.parametrize("key", ["ключ", "key\n", "a\rb", "a\x00b"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="check `api_key`") as refused:
        engine_at("http://127.0.0.1:9/v1", api_key=key)
    assert key not in str(refused.value)


class NewerModel(Handler):
    """Takes `max_completion_tokens` only, as newer OpenAI models do."""

    asked: ClassVar[list[dict[str, Any]]] = []
    carried: ClassVar[list[dict[str, str]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.asked.append(body)
        self.carried.append({name.lower(): value for name, value in self.headers.items()})
        if "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            self._reply(400, {"error": {"message": message, "code": "unsupported_parameter"}})
        else:
            self._reply(200, {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]})

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        self.reply(body, status, headers={"Content-Type": "text/plain", "Set-Cookie": "visitor=7"})


@pytest.fixture
def newer_model() -> Iterator[str]:
    """The address of a NewerModel."""
    NewerModel.asked.clear()
    NewerModel.carried.clear()
    with listening(NewerModel) as host:
        yield f"{host}/v1"


class NotFound(Handler):
    """Has nothing at any path."""

    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET


@pytest.fixture
def not_found() -> Iterator[str]:
    """The address of a host that has no such path."""
    with listening(NotFound) as host:
        yield host


class ErrorInside(NewerModel):
    """Says 200, and has an error where the reply should be."""

    error: ClassVar[object] = None

    def do_POST(self) -> None:
        self._reply(200, {"error": self.error})


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            {"message": "Provider returned error", "code": 502},
            EngineError,
            "HTTP 502: Provider returned",
        ),
        (
            {"message": "Insufficient credits", "code": 402},
            EngineRefused,
            "HTTP 402: Insufficient credits",
        ),
        ({"message": "No such user", "code": 401}, EngineRefused, "refused the key"),
        (
            {"message": "maximum context length is 9", "code": 400},
            PromptTooLong,
            "the prompt is too long",
        ),
        ({"message": "overloaded", "type": "server_error"}, EngineError, "HTTP 500: overloaded"),
        ("out of order", EngineError, "HTTP 500: out of order"),
    ],
)
async def test_an_error_in_a_reply_with_status_200_is_told_and_taken_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, error: object, kind: type[Exception], message: str
) -> None:
    monkeypatch.setattr(ErrorInside, "error", error)
    with listening(ErrorInside) as host:
        config = EngineConfig(model="m", base_url=f"{host}/v1", patience=0.0)
        engine = EndpointEngine(config)
        with pytest.raises(kind, match=message) as raised:
            await engine.complete(MESSAGES, Sampling(max_tokens=1))
        await engine.aclose()
    assert raised.type is kind


@pytest.mark.parametrize("owner", ["vllm", "memagent", "openai", None])
def test_the_salt_of_a_call_goes_to_servers_that_know_it(owner: str | None) -> None:
    engine = EndpointEngine(EngineConfig(model="m", base_url="http://127.0.0.1:1/v1"))
    sampling = Sampling(max_tokens=1, cache_salt="key-1")
    assert "cache_salt" not in engine._body(MESSAGES, sampling)
    engine._learn([{"id": "m", "owned_by": owner}])
    body = engine._body(MESSAGES, sampling)
    assert body.get("cache_salt") == ("key-1" if owner in ("vllm", "memagent") else None)
    assert "cache_salt" not in engine._body(MESSAGES, Sampling(max_tokens=1))
    assert repr(sampling) == repr(Sampling(max_tokens=1))  # evaluations resume by it


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("", "did you mean `base_url=HOST/v1`?"),
        ("/", "did you mean `base_url=HOST/v1`?"),
        ("/v1/chat/completions", "did you mean `base_url=HOST/v1`?"),
        ("/v2", "check `base_url`"),
    ],
)
@pytest.mark.parametrize("model", ["", "test-model"])
async def test_an_address_without_models_gets_the_likely_one_as_advice(
    path: str, advice: str, model: str, not_found: str
) -> None:
    async with engine_at(not_found + path, model=model) as engine:
        with pytest.raises((ConfigError, EngineRefused)) as failed:
            await (engine.complete(MESSAGES, SAMPLING) if model else engine.inspect())
    assert str(failed.value).endswith(advice.replace("HOST", not_found))
    assert "HTTP 404" in str(failed.value)


async def test_an_address_that_never_answered_is_to_be_checked() -> None:
    async with engine_at("http://127.0.0.1:9/v1", patience=0) as engine:
        with pytest.raises(EngineError, match=r"; check `base_url` and that the server runs$"):
            await engine.complete(MESSAGES, SAMPLING)


async def test_a_model_that_wants_the_newer_limit_gets_it_and_what_else_is_set(
    newer_model: str,
) -> None:
    async with engine_at(newer_model, extra_body={"top_k": 20}) as engine:
        for _ in range(2):
            sampling = Sampling(max_tokens=50, temperature=0.0, top_p=0.9, seed=0)
            assert (await engine.complete(MESSAGES, sampling)).text == "hi"
    refused, *accepted = NewerModel.asked
    assert refused["max_tokens"] == 50
    expected = {
        "model": "test-model",
        "messages": MESSAGES,
        "max_completion_tokens": 50,
        "temperature": 0.0,
        "top_p": 0.9,
        "seed": 0,
        "top_k": 20,
    }
    assert accepted == [expected, expected]


@pytest.mark.parametrize("is_openais", [False, True])
async def test_requests_carry_the_key_no_cookie_and_openais_names_to_openai_only(
    newer_model: str, monkeypatch: pytest.MonkeyPatch, is_openais: bool
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-1")
    if is_openais:
        monkeypatch.setenv("OPENAI_BASE_URL", newer_model)
    async with engine_at(newer_model, api_key="key-1") as engine:
        await engine.complete(MESSAGES, SAMPLING)
        await engine.complete(MESSAGES, SAMPLING)
    names = {"openai-organization": "org-1", "openai-project": "project-1"} if is_openais else {}
    unimportant = {"host", "content-length", "connection"}
    for carried in NewerModel.carried:
        assert {name: value for name, value in carried.items() if name not in unimportant} == {
            "accept": "application/json",
            "accept-encoding": "identity",
            "authorization": "Bearer key-1",
            "content-type": "application/json",
            "user-agent": "memagent",
            **names,
        }
