"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from memagent.errors import (
    EmptyAnswer,
    LimitReached,
    MemagentError,
    PromptTooLong,
    RunError,
    UserError,
)

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


def from_validation(error: ValidationError) -> ApiError:
    """A validation error of a request body, naming the field."""
    problem = error.errors(include_url=False, include_input=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message}", code="invalid_json")
    if not problem["loc"]:
        return ApiError(400, message, code="invalid_value")
    name = str(problem["loc"][0])
    path = ".".join(str(part) for part in problem["loc"])
    code = "missing_required_parameter" if problem["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{path}: {message[:1].lower()}{message[1:]}", param=name, code=code)
