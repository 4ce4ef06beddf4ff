"""The description of the gateway's API, as OpenAPI 3.1. Request bodies come from the models that validate them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from memagent._version import __version__
from memagent.serve.http import Json
from memagent.serve.reading.requests import GatewayChat, ResponsesRequest

REFS = "#/components/schemas/{model}"
ERRORS = {
    "400": "The request is invalid.",
    "401": "The key is missing or wrong.",
    "403": "The host or the origin is another one's.",
    "404": "There is no such model or file.",
    "405": "The path has no such method.",
    "408": "The body took too long to arrive.",
    "413": "The request or the files are too large.",
    "429": "Too many requests, or the key has used up its limit.",
    "503": "The engine failed, or the server is shutting down.",
}


def describe() -> Json:
    """The description of all endpoints."""
    schemas: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, Any] = {
        "/v1/chat/completions": {
            "post": _operation(
                "Answer a conversation of any length", body=_json(GatewayChat, schemas)
            )
        },
        "/v1/responses": {
            "post": _operation(
                "Answer an input of any length", body=_json(ResponsesRequest, schemas)
            )
        },
        "/v1/files": {
            "get": _operation("List files", parameters=LISTING),
            "post": _operation("Keep a file", body=FORM),
        },
        "/v1/files/{file_id}": {
            "get": _operation("Show a file", parameters=[FILE_ID]),
            "delete": _operation("Delete a file", parameters=[FILE_ID]),
        },
        "/v1/files/{file_id}/content": {
            "get": _operation(
                "The bytes of a file", parameters=[FILE_ID], content="application/octet-stream"
            )
        },
        "/v1/models": {"get": _operation("List the models")},
        "/v1/models/{name}": {"get": _operation("Show a model", parameters=[_in_path("name")])},
        "/health": {"get": _operation("Whether requests are accepted")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "memagent reading gateway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(
    summary: str,
    *,
    body: Json | None = None,
    parameters: list[Json] | None = None,
    content: str = "application/json",
) -> Json:
    problem = {"application/json": {"schema": {"$ref": REFS.format(model="Error")}}}
    answer: Json = {content: {}}
    if content == "application/json" and body is not None:
        answer["text/event-stream"] = {}
    return {
        "summary": summary,
        **({"parameters": parameters} if parameters else {}),
        **({"requestBody": body} if body else {}),
        "responses": {
            "200": {"description": "The result.", "content": answer},
            **{
                status: {"description": meaning, "content": problem}
                for status, meaning in ERRORS.items()
            },
        },
    }


def _json(model: type[BaseModel], schemas: dict[str, Any]) -> Json:
    schema = model.model_json_schema(ref_template=REFS, mode="validation")
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
    return {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": REFS.format(model=model.__name__)}}},
    }


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


FILE_ID = _in_path("file_id")
LISTING: list[Json] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10000}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
FORM: Json = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string"},
                },
            }
        }
    },
}
ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
