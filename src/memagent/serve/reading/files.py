"""/v1/files: a text is sent once and asked many times. Files belong to the key that sent them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from memagent.documents.document import Document
from memagent.documents.loaders import load_bytes
from memagent.serve.guard import FORM_TYPE, Route
from memagent.serve.http import Json
from memagent.serve.keys import KeyHolder
from memagent.serve.reading.requests import file_name
from memagent.serve.reading.state import GatewayState, StoredFile, in_thread
from memagent.serve.wire import ApiError

BYTES_PER_CHAR = 4
"""The most bytes of an unpacked file for each character: as many as UTF-8 takes."""
MAX_LISTED = 1000
MAX_PURPOSE = 40


PATH = "/v1/files"
FORM: Json = {
    "requestBody": {
        "required": True,
        "content": {
            FORM_TYPE: {
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
}
LISTING: Json = {
    "parameters": [
        {"name": "limit", "in": "query", "schema": {"type": "integer"}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
}


class FileStore:
    """The handlers of /v1/files."""

    def __init__(
        self,
        state: GatewayState,
        *,
        max_stored_bytes: int,
        max_request_bytes: int,
        on_delete: Callable[[str], Awaitable[None]],
    ) -> None:
        """`on_delete` is called with the owner of a file that was deleted."""
        self._state = state
        self._max_stored_bytes = max_stored_bytes
        self._max_request_bytes = max_request_bytes
        self._on_delete = on_delete

    @property
    def routes(self) -> list[Route]:
        """The routes."""
        one = f"{PATH}/{{file_id}}"
        return [
            Route("POST", PATH, self.create, is_form=True, more=FORM),
            Route("GET", PATH, self.list, more=LISTING),
            Route("GET", one, self.one),
            Route("DELETE", one, self.remove),
            Route("GET", f"{one}/content", self.content, is_download=True),
        ]

    async def create(self, request: Request) -> Response:
        """Keep a file, if its text can be read."""
        try:
            async with request.form(max_files=1, max_fields=20) as form:
                upload, purpose = form.get("file"), form.get("purpose")
                if not isinstance(upload, UploadFile):
                    raise ApiError(400, "send the file in the field `file`", param="file")
                data, name = await upload.read(), file_name(upload.filename)
        except HTTPException as error:
            raise ApiError(400, f"the form cannot be read: {error.detail}") from None
        holder = request.state.holder
        stored = await in_thread(
            self._state.opening, self._stored, holder, name, str(purpose or "user_data"), data
        )
        return JSONResponse(_card(stored))

    def _stored(self, holder: KeyHolder, name: str, purpose: str, data: bytes) -> StoredFile:
        self.opener(holder).given(data, name)  # raises what is wrong with it
        limit = self._max_stored_bytes
        stored = self._state.add_file(holder.id, name, purpose[:MAX_PURPOSE], data, max_bytes=limit)
        if stored is None:
            raise ApiError(
                413,
                f"the files of this key would have more than {limit:,} bytes; delete some",
                code="too_many_bytes",
            )
        return stored

    async def list(self, request: Request) -> Response:
        """The files of this key, the newest first."""
        limit = _limit(request.query_params.get("limit"))
        after = request.query_params.get("after")
        owner = request.state.holder.id
        found = await asyncio.to_thread(self._state.files_of, owner, after=after, limit=limit + 1)
        cards = [_card(stored) for stored in found[:limit]]
        return JSONResponse(
            {
                "object": "list",
                "data": cards,
                "has_more": len(found) > limit,
                "first_id": cards[0]["id"] if cards else None,
                "last_id": cards[-1]["id"] if cards else None,
            }
        )

    async def one(self, request: Request, file_id: str) -> Response:
        """What is known of a file."""
        return JSONResponse(_card(await self._found(request, file_id)))

    async def content(self, request: Request, file_id: str) -> Response:
        """The bytes of a file, never as a page that a browser would show."""
        stored = await self._found(request, file_id)
        headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
        path = self._state.file_path(stored)
        if not await asyncio.to_thread(path.is_file):
            raise _no_file(file_id)
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    async def remove(self, request: Request, file_id: str) -> Response:
        """Delete a file, and what is kept of it elsewhere."""
        owner = request.state.holder.id
        if not await in_thread(self._state.writing, self._state.remove_file, owner, file_id):
            raise _no_file(file_id)
        await self._on_delete(owner)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    def opener(self, holder: KeyHolder) -> RequestFiles:
        """Opens the files of one request."""
        own = holder.limits.max_request_bytes or self._max_request_bytes
        return RequestFiles(self._state, holder.id, min(own, self._max_request_bytes))

    async def _found(self, request: Request, file_id: str) -> StoredFile:
        stored = await asyncio.to_thread(self._state.file, request.state.holder.id, file_id)
        if stored is None:
            raise _no_file(file_id)
        return stored


class RequestFiles:
    """The files of one request: each is opened once, and all have a number of characters together."""

    def __init__(self, state: GatewayState, owner: str, max_chars: int) -> None:
        self._state = state
        self._owner = owner
        self._max_chars = max_chars
        self._num_chars = 0
        self._opened: dict[str, Document] = {}

    def stored(self, file_id: str) -> Document:
        """A file of the owner by its id. Raises ApiError."""
        if file_id in self._opened:
            return self._counted(self._opened[file_id])
        stored = self._state.file(self._owner, file_id)
        if stored is None:
            raise _no_file(file_id)
        self._opened[file_id] = self.given(self._state.file_bytes(stored), stored.name)
        return self._opened[file_id]

    def given(self, data: bytes, name: str) -> Document:
        """A file by its contents. Raises ApiError."""
        left = self._max_chars - self._num_chars
        return self._counted(load_bytes(data, name, max_bytes=BYTES_PER_CHAR * left))

    def _counted(self, document: Document) -> Document:
        self._num_chars += len(document.text)
        if self._num_chars > self._max_chars:
            raise ApiError(
                413,
                f"the files of a request have at most {self._max_chars:,} characters of text together, as many as "
                "it may have bytes; send less at once",
                code="too_much_text",
            )
        return document


def _no_file(file_id: str) -> ApiError:
    return ApiError(404, f"there is no file {file_id[:100]!r}", param="file_id", code="not_found")


def _limit(value: str | None) -> int:
    if value is None:
        return MAX_LISTED
    if not (value.isascii() and value.isdigit() and len(value) < 9 and 1 <= int(value) <= 10_000):
        raise ApiError(400, "limit must be from 1 to 10000", param="limit")
    return min(int(value), MAX_LISTED)


def _card(stored: StoredFile) -> Json:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": int(stored.created),
        "filename": stored.name,
        "purpose": stored.purpose,
        "status": "processed",
    }
