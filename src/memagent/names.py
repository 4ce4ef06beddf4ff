"""Names that a user may misspell: what was probably meant, or what there is.

hint("strct", GRADERS)      # 'did you mean strict?'
hint("xyz", GRADERS)        # 'known: strict, lenient, ...'
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CUTOFF = 0.6
"""How similar a name must be to be suggested; difflib's own default."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = CUTOFF) -> str | None:
    """The known name closest to a misspelt one; None if none is similar."""
    by_folded = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[near[0]] if near else None


def hint(name: str, known: Iterable[str], *, cutoff: float = CUTOFF) -> str:
    """The end of an error about an unknown name: a suggestion, or the list of known names."""
    known = tuple(known)
    near = nearest(name, known, cutoff=cutoff)
    return f"did you mean {near}?" if near else f"known: {', '.join(known) or 'none'}"
