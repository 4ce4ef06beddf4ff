"""The reading gateway under load: short and long requests together, an engine of 50 ms a call.

    python -m benchmarks.gateway                         100 short and 100 long requests at once
    python -m benchmarks.gateway --requests 40 --tokens 20000

Measured: what the gateway adds to a short request against the engine alone, one after the other; then all requests
at once: lost or mixed-up answers, the times of short requests as multiples of their time alone, memory of the
server's process. The server runs in its own process. The exit code is 1 when an answer is lost or mixed up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from memagent.serve.http import prepare_process
from memagent.types import Completion, Message, Sampling, Usage
from tests.support.gateways import MODEL, PatientEngine, serving_gateway

FACT = "The parcel "

CALL_SECONDS = 0.05
NUM_SOLO = 40
"""Short requests one after the other."""
WINDOW = {"window": 8192, "chunk_tokens": 5000, "memory_tokens": 1024}
LINE = "Line {} of the report tells of rain and wind on that day."
TOKENS_PER_LINE = 16
"""As the estimate counts a line."""


class FactEngine(PatientEngine):
    """Keeps the line with the fact, which costs next to nothing: a real engine computes elsewhere."""

    def __init__(self) -> None:
        super().__init__(CALL_SECONDS)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        await asyncio.sleep(self.seconds)
        text = _fact_in(messages)
        usage = Usage(calls=1, prompt_tokens=len(messages[-1]["content"]) // 4, completion_tokens=8)
        return Completion(text=text, finish_reason="stop", usage=usage)


def _fact_in(messages: Sequence[Message]) -> str:
    """The line with a fact in a section or memory; of a short request, what it says."""
    text = messages[-1]["content"]
    start = text.find(FACT)
    if start < 0:
        return text if len(text) < 200 else "nothing yet"
    return text[start : text.find("\n", start)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What is sent."""

    num_requests: int = 200
    """Half short, half long."""
    long_tokens: int = 40_000
    reading_calls: int = 8


@dataclass(slots=True)
class LoadReport:
    """What came of it; times in seconds."""

    engine: list[float] = field(default_factory=list)
    """A call of the engine alone."""
    solo: list[float] = field(default_factory=list)
    """A short request with nothing else running."""
    short: list[float] = field(default_factory=list)
    """Short requests among long ones."""
    long: list[float] = field(default_factory=list)
    num_wrong: int = 0
    num_lost: int = 0
    cpu: float = 0.0
    """Processor time of the server for a short request."""
    megabytes: tuple[float, float] = (0.0, 0.0)
    """Of the server, before and at its highest."""

    @property
    def added(self) -> float:
        """What the gateway adds to a short request, in the median."""
        return statistics.median(self.solo) - statistics.median(self.engine)

    @property
    def p95(self) -> float:
        """Of short requests under load, as a multiple of their median alone."""
        return percentile(self.short, 0.95) / statistics.median(self.solo)


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def short_body(number: int) -> dict[str, Any]:
    """A conversation that fits the window; the engine repeats it."""
    content = f"Ticket {number} is open."
    return {"model": MODEL, "messages": [{"role": "user", "content": content}]}


def long_body(number: int, num_tokens: int) -> dict[str, Any]:
    """A text with one fact in its middle, and a question about it."""
    lines = [LINE.format(index) for index in range(num_tokens // TOKENS_PER_LINE)]
    lines.insert(len(lines) // 2, f"{FACT}{number} lies in cellar {number * 7}.")
    messages = [
        {"role": "user", "content": "\n\n".join(lines)},
        {"role": "user", "content": f"Where does the parcel {number} lie?"},
    ]
    return {"model": MODEL, "messages": messages}


def _serve(folder: str, plan: LoadPlan, pipe: Any) -> None:
    """The server's process."""
    prepare_process()
    with serving_gateway(
        Path(folder),
        FactEngine(),
        reading=WINDOW,
        server={"max_concurrency": 2 * plan.num_requests, "request_log": False},
        max_readings=plan.num_requests,
        reading_calls=plan.reading_calls,
    ) as gateway:
        pipe.send(gateway.url)
        pipe.recv()


@contextmanager
def server_process(plan: LoadPlan) -> Iterator[tuple[str, int]]:
    """A gateway in its own process; its URL and process id."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_serve, args=(folder, plan, theirs), daemon=True)
        process.start()
        try:
            yield ours.recv(), process.pid or 0
        finally:
            ours.send("end")
            process.join()


def megabytes(pid: int, name: str) -> float:
    """Memory of a process, from a line such as VmRSS of its status."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1e3


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(plan: LoadPlan) -> LoadReport:
    """All of it."""
    report = LoadReport()
    engine = FactEngine()
    with server_process(plan) as (url, pid):
        address = urlsplit(url)
        place = (address.hostname or "", address.port or 0)
        await _sent(place, request_bytes(short_body(0)), "Ticket 0 ", report)
        cpu = cpu_seconds(pid)
        for number in range(NUM_SOLO):
            body = short_body(number)
            report.engine.append(await _engine_seconds(engine, body))
            seconds = await _sent(place, request_bytes(body), f"Ticket {number} ", report)
            report.solo.append(seconds)
        report.cpu = (cpu_seconds(pid) - cpu) / NUM_SOLO
        before = megabytes(pid, "VmRSS")
        await _send_all(place, plan, report)
        report.megabytes = (before, megabytes(pid, "VmHWM"))
    return report


def request_bytes(body: dict[str, Any]) -> bytes:
    """A request as it is sent: a client library would cost more than what is measured."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _engine_seconds(engine: PatientEngine, body: dict[str, Any]) -> float:
    started = time.perf_counter()
    await engine.complete(body["messages"], Sampling(max_tokens=100))
    return time.perf_counter() - started


async def _sent(place: tuple[str, int], request: bytes, expected: str, report: LoadReport) -> float:
    """Seconds of a request, whose answer must hold `expected`."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(*place)
    writer.write(request)
    answer = await reader.read(-1)
    seconds = time.perf_counter() - started
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        report.num_lost += 1
    elif expected not in json.loads(content)["choices"][0]["message"]["content"]:
        report.num_wrong += 1
    return seconds


async def _send_all(place: tuple[str, int], plan: LoadPlan, report: LoadReport) -> None:
    """Long requests first; short ones arrive while they are read."""
    half = plan.num_requests // 2
    bodies = [request_bytes(long_body(number, plan.long_tokens)) for number in range(half)]

    async def long(number: int) -> None:
        expected = f"in cellar {number * 7}."
        report.long.append(await _sent(place, bodies[number], expected, report))

    async def short(number: int) -> None:
        await asyncio.sleep(0.5 + number * 0.02)
        request = request_bytes(short_body(number))
        report.short.append(await _sent(place, request, f"Ticket {number} ", report))

    await asyncio.gather(*(long(n) for n in range(half)), *(short(n) for n in range(half)))


def main() -> int:
    """Measure and print a table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=40_000, help="of each long text")
    parser.add_argument("--reading-calls", type=int, default=8)
    options = parser.parse_args()
    plan = LoadPlan(
        num_requests=options.requests,
        long_tokens=options.tokens,
        reading_calls=options.reading_calls,
    )
    report = asyncio.run(measure(plan))
    half = plan.num_requests // 2
    print(f"requests at once     {half} short, {half} long of {plan.long_tokens:,} tokens")
    print(f"lost, mixed up       {report.num_lost}, {report.num_wrong}")
    print(f"engine alone         {1e3 * statistics.median(report.engine):.1f} ms a call")
    print(
        f"the gateway adds     {1e3 * report.added:.1f} ms to a short request ({1e3 * report.cpu:.1f} ms of processor time)"
    )
    print(f"short, under load    p50 {percentile(report.short, 0.5) / statistics.median(report.solo):.2f}, "
          f"p95 {report.p95:.2f} of the time alone")  # fmt: skip
    print(
        f"long                 p50 {percentile(report.long, 0.5):.1f} s, last {max(report.long):.1f} s"
    )
    print(
        f"memory               {report.megabytes[0]:.0f} MB before, {report.megabytes[1]:.0f} MB at most"
    )
    return 1 if report.num_lost or report.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
