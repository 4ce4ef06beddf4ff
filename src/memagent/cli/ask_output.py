"""What `memagent ask` prints: answers and plans on standard output, everything else on the side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memagent.agent.evidence.ledger import Citation
from memagent.agent.plan import ReadingPlan
from memagent.agent.trace import Trace
from memagent.agent.work import Speed
from memagent.cli.shared.estimates import cost_and_time, time_text
from memagent.cli.shared.run_command import print_json
from memagent.engines.base import BaseEngine
from memagent.types import Prices


def print_answers(traces: Sequence[Trace], *, as_json: bool) -> None:
    """The answers; with their questions if there are several."""
    if as_json:
        results = [_result(trace) for trace in traces]
        print_json(results[0] if len(results) == 1 else results)
    elif len(traces) == 1:
        print(answer_text(traces[0]))
    else:
        print("\n\n".join(f"{trace.question}\n{answer_text(trace)}" for trace in traces))


def answer_text(trace: Trace) -> str:
    """The answer, and below it the quotes that it cites."""
    lines = [one.line() for one in trace.citations]
    return "\n".join([f"{trace.final_answer}", *(["", *lines] if lines else [])])


def print_plan(
    plan: ReadingPlan,
    prices: Prices | None,
    speed: Speed | None,
    engine: BaseEngine,
    *,
    as_json: bool,
) -> None:
    """What a reading will take."""
    seconds = plan.seconds(speed, is_shared=engine.runs_here) if speed else None
    if as_json:
        print_json({**asdict(plan), **cost_and_time(plan.work, prices, seconds)})
        return
    about = "" if plan.is_exact else " (estimated)"
    print(f"sections            {plan.num_chunks:>14,}")
    up_to = f" to {plan.max_calls:,}" if plan.max_calls > plan.num_calls else ""
    print(f"calls               {plan.num_calls:>14,}{up_to}")
    print(f"prompt tokens       {plan.prompt_tokens:>14,}{about}")
    print(f"  with memory up to {plan.prompt_tokens + plan.max_memory_tokens:>14,}{about}")
    print(f"completion up to    {plan.max_completion_tokens:>14,}")
    if prices:
        low, high = plan.work.cost(prices)
        print(f"cost between        {low:>14,.4f} and {high:,.4f}")
    print(f"time                {time_text(seconds, engine.model)}")


def _result(trace: Trace) -> dict[str, Any]:
    return {
        "answer": trace.final_answer,
        "question": trace.question,
        **({"citations": [_citation(one) for one in trace.citations]} if trace.has_quotes else {}),
        **({"unread": trace.unread} if trace.unread else {}),
        **({"num_withheld": trace.num_withheld} if trace.num_withheld else {}),
        "num_chunks": trace.num_chunks,
        "usage": asdict(trace.usage),
        "trace": trace.to_dict(),
    }


def _citation(citation: Citation) -> dict[str, Any]:
    quote = citation.quote
    return {
        "number": citation.number,
        "where": citation.where,
        "text": quote.text,
        "start": quote.start,
        "end": quote.end,
        **({"item": quote.item, "value": quote.value} if quote.item else {}),
        "places": [asdict(place) for place in quote.places],
    }
