"""What became of an example's evidence in a reading: noted, kept, quoted, cited.

scores = evidence_scores(example, trace)
scores.captured, scores.retained                       # was it ever in a memory, was it in the last one
scores.citation_precision, scores.citation_recall      # where the answer cites quotes
"""

from __future__ import annotations

from typing import NamedTuple

from memagent.agent.trace import Trace
from memagent.data.example import Example
from memagent.rewards.evidence import overlap, recall


class EvidenceScores(NamedTuple):
    """Shares from 0 to 1; None where the evidence is not known, or nothing was kept of that kind."""

    captured: float | None = None
    """Evidence that was in any memory, word for word, or as its note words it."""
    retained: float | None = None
    """Evidence that was in the last memory."""
    quoted: float | None = None
    """Evidence that is in the ledger, by its place."""
    citation_precision: float | None = None
    """Cited quotes that are evidence; None for an answer that cites none."""
    citation_recall: float | None = None
    """Evidence that the answer cites."""

    def known(self) -> dict[str, float]:
        """Those that have a value, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def evidence_scores(example: Example, trace: Trace, *, is_cut: bool = False) -> EvidenceScores:
    """Compare a reading with the evidence of its example.

    `is_cut`: the text was read without a part, so that places in it are not those of the example.
    """
    evidence = [(item.text, item.note) for item in example.evidence]
    noted = recall(evidence, [step.memory for step in trace.steps])
    captured, retained = noted or (None, None)
    found = EvidenceScores(captured, retained)
    if not trace.has_quotes or not example.evidence or is_cut:
        return found
    wanted = example.evidence_offsets()
    kept = overlap([quote.span for quote in trace.ledger], wanted)
    cited = overlap([one.quote.span for one in trace.citations], wanted)
    assert kept is not None, "there is evidence"
    assert cited is not None, "there is evidence"
    return found._replace(
        quoted=kept.recall, citation_precision=cited.precision, citation_recall=cited.recall
    )
