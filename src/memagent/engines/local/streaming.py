"""Streamed text of a reply: only what later tokens can no longer change.

    tokens   "caf"   "\\xc3"   "\\xa9 EN"   "D"          stop text: END
    certain  "caf"   ""       "é "         ""           "EN" may become END, so it is held back

Characters split over tokens and prefixes of stop texts are held back until they are decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What an incomplete character decodes to."""


class TextStream:
    """Turns tokens into pieces of text that join to the text of the whole reply."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._recent: list[int] = []
        """The tokens since the one before the last whole character: enough context to decode."""
        self._num_known = 0
        """How many of the recent tokens are decided."""
        self._held = ""
        """Whole characters that may be a prefix of a stop text."""
        self._num_given = 0
        self._is_stopped = False

    def add(self, token_id: int) -> str:
        """The text that is certain after one more token; may be empty."""
        self._held += self._new_characters(token_id)
        if self._is_stopped:
            return ""
        ends = [self._held.find(stop) for stop in self._stops if stop in self._held]
        self._is_stopped = bool(ends)
        return self._give(min(ends) if ends else len(self._held) - self._num_undecided())

    def rest(self, text: str) -> str:
        """The rest of the reply, given its whole text."""
        return text[self._num_given :]

    def _new_characters(self, token_id: int) -> str:
        self._recent.append(token_id)
        known = self._decode(self._recent[: self._num_known])
        text = self._decode(self._recent)
        if text.endswith(HALF_CHARACTER) or len(text) <= len(known):
            return ""
        del self._recent[: self._num_known]
        self._num_known = len(self._recent)
        return text[len(known) :]

    def _num_undecided(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop text."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if self._held.endswith(
                tuple(stop[:length] for stop in self._stops if len(stop) > length)
            ):
                return length
        return 0

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        self._num_given += len(given)
        return given
