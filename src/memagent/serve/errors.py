"""Refusals in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from memagent.errors import MemagentError, UserError

RETRY_SECONDS = 1
"""What a client is told to wait when the server is busy."""


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def response(self) -> JSONResponse:
        """The error as it goes over the wire."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients know."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": "server_error" if self.status >= 500 else kind,
                "param": self.param,
                "code": self.code,
            }
        }


ERROR_TYPES: dict[int, str] = {401: "authentication_error", 429: "rate_limit_error"}
"""By status; other refusals are invalid requests, and from 500 on it is our fault."""

INTERNAL = ApiError(500, "the server failed; its log says why", code="internal_error")


def from_memagent(error: MemagentError) -> ApiError:
    """An error of the engine: the request has to change, or the engine cannot answer now."""
    if isinstance(error, UserError):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(503, str(error), code="engine_error")


def from_validation(error: ValidationError) -> ApiError:
    """What is wrong with the body of a request, naming the field."""
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
