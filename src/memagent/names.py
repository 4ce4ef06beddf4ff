"""Names that a user may misspell or that may be paths: what was probably meant, or what there is.

>>> hint("strct", ["strict", "lenient"])
'did you mean strict?'
>>> hint("xyz", ["strict", "lenient"])
'known: strict, lenient'
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

CUTOFF = 0.6
"""How similar a name must be to be suggested; difflib's own default."""
MAX_BEGUN = 3
"""Suggestions for a name that several known ones begin with."""


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


def hint_in_folders(name: str, known: Iterable[str]) -> str:
    """As `hint`, for names such as ruler/vt, which a user may give without the folder, or only begin.

    >>> hint_in_folders("vt", ["ruler/vt", "ruler/cwe", "small/colours"])
    'did you mean ruler/vt?'
    >>> hint_in_folders("ruler", ["ruler/vt", "ruler/cwe", "small/colours"])
    'known: ruler/vt, ruler/cwe'
    """
    known = tuple(known)
    wanted = name.casefold().strip("/")
    folder = wanted.partition("/")[0]
    inside = [each for each in known if each.casefold().startswith(f"{folder}/")]
    if wanted == folder and inside:
        return hint("", inside)
    for candidates in (inside, known):
        if near := _near_tails(wanted.rpartition("/")[2], candidates):
            return f"did you mean {' or '.join(near)}?"
    return hint("", inside or known)


def _near_tails(tail: str, known: Iterable[str]) -> list[str]:
    """Known names whose last part begins as `tail` does, else the one that is most similar."""
    tails = {each.casefold().rpartition("/")[2]: each for each in known}
    begun = [each for short, each in tails.items() if len(tail) > 1 and short.startswith(tail)]
    return begun[:MAX_BEGUN] or [tails[short] for short in similar(tail, tails)]


def absolute_path(name: str) -> str:
    """The absolute form of a path that exists; other names, such as those of models, as they are.

    A run keeps it, so that resuming finds the path from any folder.
    """
    path = Path(name).expanduser()
    is_path = path.exists() and name not in ("bytes", "estimate")  # which are tokenizers
    return str(path.resolve()) if is_path else name
