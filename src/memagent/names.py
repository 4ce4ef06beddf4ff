"""Names that a user may misspell: what was probably meant, or what there is.

>>> hint("strct", ["strict", "lenient"])
'did you mean strict?'
>>> hint("xyz", ["strict", "lenient"])
'known: strict, lenient'
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CUTOFF = 0.6
"""How similar a name must be to be suggested; difflib's own default."""


def similar(
    name: str, known: Iterable[str], *, max_num: int = 1, cutoff: float = CUTOFF
) -> list[str]:
    """The known names closest to a misspelt one, whatever their case; the closest first."""
    by_folded = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), by_folded, n=max_num, cutoff=cutoff)
    return [by_folded[each] for each in near]


def nearest(name: str, known: Iterable[str], *, cutoff: float = CUTOFF) -> str | None:
    """The known name closest to a misspelt one; None if none is similar."""
    return next(iter(similar(name, known, cutoff=cutoff)), None)


def hint(
    name: str,
    known: Iterable[str],
    *,
    otherwise: str | None = None,
    max_num: int = 1,
    cutoff: float = CUTOFF,
) -> str:
    """The end of an error about an unknown name: what was probably meant, else what there is.

    `otherwise` stands in place of the list of known names.
    """
    known = tuple(known)
    near = similar(name, known, max_num=max_num, cutoff=cutoff)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(known) or 'none'}" if otherwise is None else otherwise
