"""What crosses the wire: errors in OpenAI's format, {"error": {"message", "type", "param", "code"}}, and requests, validated.

Unknown fields are ignored, because clients send many. Known fields are validated, and known but
unsupported ones are refused rather than ignored.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, ClassVar, Self, TypeVar

from fastapi.responses import JSONResponse
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from memagent.errors import (
    EmptyAnswer,
    LimitReached,
    MemagentError,
    PromptTooLong,
    RunError,
    UserError,
)
from memagent.types import Message, Sampling

log = logging.getLogger(__name__)
RETRY_SECONDS = 1
"""`Retry-After` of a busy server."""


class ApiError(Exception):
    """An error response."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def response(self) -> JSONResponse:
        """The HTTP response."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)

    def body(self) -> dict[str, Any]:
        """The JSON body, as OpenAI's clients parse it."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        fields = ErrorFields(
            message=self.message,
            type="server_error" if self.status >= 500 else kind,
            param=self.param,
            code=self.code,
        )
        return ErrorBody(error=fields).model_dump()


ERROR_TYPES: dict[int, str] = {401: "authentication_error", 429: "rate_limit_error"}
"""By status; other 4xx are invalid requests, 5xx are server errors."""

MEANINGS: dict[int | str, str] = {
    400: "The request is invalid.",
    401: "The key is missing or wrong.",
    403: "The host or the origin is another one's.",
    404: "There is no such model or file.",
    405: "The path has no such method.",
    408: "The body took too long to arrive.",
    413: "The request or the files are too large.",
    429: "Too many requests, or the key has used up its limit.",
    503: "The engine failed, or the server is shutting down.",
    "default": "Another error.",
}
"""What each status means."""


class ErrorFields(BaseModel):
    """What an error response tells."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The JSON body of an error response."""

    error: ErrorFields


INTERNAL = ApiError(500, "internal server error; see the log of the server", code="internal_error")


def from_memagent(error: MemagentError) -> ApiError:
    """An error of the engine or the reader: 400 if the request is invalid, else 429 or 503."""
    if isinstance(
        error, RunError
    ):  # the server's own folder, whose path is not the client's business
        log.error("%s", error)
        return ApiError(503, "the server cannot keep its state; see its log", code="state_error")
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, LimitReached):
        return ApiError(429, str(error), code="insufficient_quota")
    if isinstance(error, UserError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, EmptyAnswer):
        return ApiError(503, str(error), code="engine_error")
    log.error("%s", error)  # it may name an address, which is not the client's business
    return ApiError(503, "the engine of this server failed; see its log", code="engine_error")


# --- requests ---------------------------------------------------------------------------------------


MAX_CHOICES = 16
MAX_STOPS = 16
MAX_PROMPTS = 256
MAX_SALT = 1000
"""Characters of a salt."""
DEFAULT_COMPLETION_TOKENS = 16
"""Default `max_tokens` of `/v1/completions`, as at OpenAI."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "prompt_logprobs": (None, 0),
}
"""Fields of OpenAI and vLLM that would change the reply, with the values that have no effect."""

_mark = re.compile(rb'[\[{,]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string of a JSON text, or where something else begins."""

W = TypeVar("W", bound="WireModel")


def parse(kind: type[W], body: bytes) -> W:
    """Parse a request body. Raises ApiError: 400 that names the field, or 413."""
    for number, _ in enumerate(_mark.finditer(body)):  # what the body becomes is not built for this
        if number >= kind.max_marks:
            raise ApiError(
                413,
                f"the request has more than {kind.max_marks:,} strings, brackets and commas; send fewer messages "
                "and parts, or the text as a file",
                code="too_many_parts",
            )
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        raise ApiError(400, f"the body is not JSON: {message}", code="invalid_json")
    if not problem["loc"]:
        raise ApiError(400, message, code="invalid_value")
    path = ".".join(map(str, problem["loc"]))
    code = "missing_required_parameter" if problem["type"] == "missing" else "invalid_value"
    message = f"{path}: {message[:1].lower()}{message[1:]}"
    raise ApiError(400, message, param=str(problem["loc"][0]), code=code)


class WireModel(BaseModel):
    """Base of request models: unknown fields are ignored, types are not coerced."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    max_marks: ClassVar[int] = 100_000
    """Strings, brackets and commas of a body, at most; each becomes an object or more."""


class StreamOptions(WireModel):
    """Options of a stream."""

    include_usage: bool | None = None
    """A last chunk with the usage and no choice."""


def _texts(value: Any) -> Any:
    """A text or a list of texts as a tuple."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a text or a list of texts")
    if len(texts) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop texts")
    if "" in texts:
        raise ValueError("a stop text must not be empty")
    return tuple(texts)


class GeneratingRequest(WireModel):
    """Fields of all endpoints that generate."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED
    reasons: ClassVar[dict[str, str]] = {}
    """Why fields are refused, by name, where a plain refusal does not tell."""

    model: str | None = None
    """If given, must be the served model."""
    temperature: float | None = Field(default=None, ge=0)
    """Greedy if omitted."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("the body must be a JSON object")
        for name, harmless in cls.unsupported.items():
            if values.get(name) not in harmless:
                message = cls.reasons.get(name, f"{name} is not supported by this server; omit it")
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        return values


class ApiRequest(GeneratingRequest):
    """Fields of chats and plain completions."""

    max_tokens: int | None = Field(default=None, ge=1)
    top_k: int | None = Field(default=None, ge=-1)
    """0 and -1 disable it, as in vLLM."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Choice number i is sampled with `seed + i`."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT)
    """As in vLLM: what is cached of prompts is used for requests with the same salt only."""
    return_token_ids: bool | None = None
    """As in vLLM: include the token ids of prompt and completion."""

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream=true")
        return self

    @property
    def num_choices(self) -> int:
        """Replies per prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, *, max_tokens: int, choice: int) -> Sampling:
        """The sampling settings of choice number `choice`."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            seed=None if self.seed is None else self.seed + choice,
            stop=self.stop,
            cache_salt=self.cache_salt,
        )


def _joined(value: Any) -> Any:
    """The content of a message: a text, or text parts, joined."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of text parts")
    for part in value:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError('parts must be {"type": "text", "text": ...}; only text is supported')
    return "".join(part["text"] for part in value)


class WireMessage(WireModel):
    """One message of a conversation."""

    role: str
    content: Annotated[str, BeforeValidator(_joined)] = ""


def _only_zero(value: int | None) -> int | None:
    if value:
        raise ValueError("only the logprob of the sampled token is returned; use 0")
    return value


NumAlternatives = Annotated[int | None, Field(ge=0), AfterValidator(_only_zero)]
"""Number of alternative tokens to list."""


class ChatFields(ApiRequest):
    """Fields of chats, whatever their messages may hold."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens of a reply; None: as many as fit the window."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)


class ChatRequest(ChatFields):
    """POST /v1/chat/completions."""

    messages: list[WireMessage] = Field(min_length=1)
    top_logprobs: NumAlternatives = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply has the log-probabilities of its tokens."""
        return bool(self.logprobs)

    @property
    def conversation(self) -> list[Message]:
        """The messages for the engine; the newer role `developer` means `system`."""
        return [
            Message(
                role="system" if message.role == "developer" else message.role,
                content=message.content,
            )
            for message in self.messages
        ]


Prompt = str | tuple[int, ...]
"""A text or token ids."""


def _prompts(value: Any) -> Any:
    """OpenAI's forms of `prompt`, as a tuple of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and _are_ids(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, or token ids")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request")
    for prompt in value:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and _are_ids(prompt)):
            raise ValueError("must be a text, a list of texts, or token ids")
        if not prompt:
            raise ValueError("a prompt must not be empty")
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value)


def _are_ids(value: list[Any]) -> bool:
    return all(type(part) is int for part in value)


class CompletionRequest(ApiRequest):
    """POST /v1/completions."""

    max_marks: ClassVar[int] = 1_000_000  # prompts may be token ids, a comma each
    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_prompts)]
    logprobs: NumAlternatives = None

    @property
    def token_limit(self) -> int:
        """Maximum tokens of a reply."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply has the log-probabilities of its tokens."""
        return self.logprobs is not None


LocalRequest = ChatRequest | CompletionRequest
"""What a local model is asked."""
