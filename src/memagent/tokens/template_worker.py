"""The process that renders chat templates; `templates.py` starts it and talks to it.

It imports nothing of memagent, has a limit on memory, ends with its parent, and its parent ends it when a
template takes too long. A message is a length of 8 bytes and so many bytes of JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

if __name__ == "__main__":
    sys.path += sys.argv[1:]  # where the parent found Jinja

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 768 << 20
SPARE_CHARS = 4 << 20
GROWTH = 4
"""A rendered conversation is at most so many times as long as its messages, and `SPARE_CHARS` more."""


def main() -> None:
    """Render until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is left to the parent
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while request := _receive(source):
        try:
            body = json.dumps(reply_to(json.loads(request), len(request))).encode()
        except Exception as error:  # a template is a program and may raise anything
            body = json.dumps({"error": _reason(error)}).encode()
        target.write(len(body).to_bytes(8, "little") + body)
        target.flush()


def reply_to(request: dict[str, Any], size: int) -> dict[str, str]:
    """A rendered conversation, or why the template cannot be parsed."""
    try:
        template = _compiled(request["template"])
    except Exception as error:  # of Jinja, or a recursion too deep
        return {"broken": str(error)[:500] or type(error).__name__}
    return {"text": render(template, request["values"], size)}


def render(template: Template, values: dict[str, Any], size: int) -> str:
    """A conversation in a template, as transformers renders it."""
    pieces, num_chars = [], 0
    for piece in template.generate(**values):
        num_chars += len(piece)
        if num_chars > GROWTH * size + SPARE_CHARS:
            raise ValueError("the rendered conversation is far longer than its messages")
        pieces.append(piece)
    return "".join(pieces)


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return make_environment().from_string(source)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}`, with which templates mark replies; it changes no text."""

    tags = {"generation"}  # noqa: RUF012  as Jinja names it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _reason(error: Exception) -> str:
    name = "" if type(error) is TemplateError else type(error).__name__
    return ": ".join(part for part in (name, str(error)[:500]) if part)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _receive(source: BinaryIO) -> bytes:
    head = source.read(8)
    return source.read(int.from_bytes(head, "little")) if len(head) == 8 else b""


if __name__ == "__main__":
    main()
