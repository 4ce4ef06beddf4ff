"""Which files of a folder are text worth reading, in a stable order.

Left out, as git and its users would: what `.gitignore` files rule out, at every level and from the
root of the repository down; version control, caches and virtual environments; hidden files and
folders (they hold settings and secrets, so only a few that describe a project are kept); run directories,
whose answers and memories are no part of the text, and which grow while it is read.
Links are not followed. Inside the folder a file is found under its own name, and a link that leads out
of it is reported: whoever made the folder must not choose which other files are read and sent away.

    docs/  .gitignore: *.log, !keep.log      ─▶   docs/index.md
           index.md keep.log run.log              docs/keep.log
           api/a.md                               docs/api/a.md     (files first, then folders)
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from memagent.documents.formats.raw import missing_library
from memagent.errors import DocumentError
from memagent.run_files import LOCK
from memagent.runs import JOURNAL, MANIFEST

MAX_IGNORE_BYTES = 1024 * 1024
MAX_DOUBLE_STARS = 4
"""How many `**` a line of a `.gitignore` may have; the time to compare a path grows with each by its length."""
KEPT_HIDDEN = frozenset(
    {".circleci", ".github", ".gitlab", ".gitlab-ci.yml", ".pre-commit-config.yaml"}
)
SKIPPED_FOLDERS = frozenset({"CVS", "_darcs", "__pycache__", "node_modules"})
"""Version control or generated files, though not hidden."""
CACHE_MARKS = ("CACHEDIR.TAG", "pyvenv.cfg")
"""A folder with such a file can be rebuilt."""


class Skipped(NamedTuple):
    """A file of a folder that was meant to be read and could not be."""

    source: str
    reason: str
    """One line that says what to change, to go behind the name: `is binary, not text; …`."""


class FoundFiles(NamedTuple):
    """The files of a folder, relative to it, and the subfolders that cannot be listed."""

    files: list[Path]
    unreadable: list[Path]
    outside: list[Path]
    """Links to files that do not lie in the folder."""


def find_files(folder: Path) -> FoundFiles:
    """Files to read below `folder`. An error if the folder itself cannot be listed."""
    root = folder.resolve()
    found = FoundFiles([], [], [])
    stack = [(root, _rules_above(root))]  # not recursion: trees may be deeper than Python's stack
    while stack:
        current, outer_rules = stack.pop()
        try:
            entries = sorted(os.scandir(current), key=lambda entry: entry.name)
        except OSError:
            if current == root:
                raise
            found.unreadable.append(current.relative_to(root))
            continue
        rules = (*outer_rules, *_rules_in(current))
        kept = [entry for entry in entries if not _is_left_out(entry, rules)]
        for entry in kept:
            relative = Path(entry.path).relative_to(root)
            if _leads_outside(entry, root):
                found.outside.append(relative)
            elif _is_file(entry):
                found.files.append(relative)
        folders = [Path(entry.path) for entry in kept if entry.is_dir(follow_symlinks=False)]
        stack += [(path, rules) for path in reversed(folders)]
    return found


class _Rule(NamedTuple):
    """One line of a `.gitignore`.

    pathspec reads the wildcards. It also matches whatever lies below a match, which git does not:
    git asks about each folder on the way first, and a later `!` may take a folder back.
    """

    regex: re.Pattern[str]
    """Matches this very path, where folders end in a slash."""
    ignores: bool
    """False: the line begins with `!`."""
    is_for_folders: bool


class _Rules(NamedTuple):
    """One `.gitignore` file."""

    folder: str
    """Where it lies, with a slash at the end; its rules are relative to this."""
    rules: tuple[_Rule, ...]

    def verdict(self, path: str) -> bool | None:
        """True: ignored; False: taken back by `!`; None: no rule for this path."""
        relative = path[len(self.folder) :]
        about = (rule for rule in reversed(self.rules) if rule.regex.search(relative))
        is_folder = path.endswith("/")
        return next((rule.ignores for rule in about if is_folder or not rule.is_for_folders), None)


def _is_left_out(entry: os.DirEntry[str], rules: tuple[_Rules, ...]) -> bool:
    is_folder = entry.is_dir(follow_symlinks=False)
    if entry.name.startswith(".") and entry.name not in KEPT_HIDDEN:
        return True
    if is_folder and (entry.name in SKIPPED_FOLDERS or _has(entry.path, CACHE_MARKS)):
        return True
    if is_folder and _has(entry.path, (MANIFEST,)) and _has(entry.path, (LOCK, JOURNAL)):
        return True
    return _is_ignored(entry.path + "/" if is_folder else entry.path, rules)


def _has(folder: str, names: Iterable[str]) -> bool:
    """Whether a folder has one of these files."""
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether to read an entry. Links that lead nowhere count, so that they are reported."""
    if entry.is_symlink():
        return not os.path.exists(entry.path) and not os.path.islink(os.path.realpath(entry.path))
    return entry.is_file()


def _leads_outside(entry: os.DirEntry[str], root: Path) -> bool:
    """Whether an entry is a link to a file elsewhere."""
    if not entry.is_symlink():
        return False
    target = os.path.realpath(entry.path)
    return os.path.isfile(target) and not Path(target).is_relative_to(root)


def _is_ignored(path: str, rules: tuple[_Rules, ...]) -> bool:
    """The innermost `.gitignore` that says anything decides. Folders end in a slash."""
    verdicts = (rule.verdict(path) for rule in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _rules_above(root: Path) -> tuple[_Rules, ...]:
    """Rules of the repository that `root` lies in.

    None of them count where they rule out `root` itself: the user asked for it by name.
    """
    rules: tuple[_Rules, ...] = ()
    for folder in _folders_above(root):
        if _is_ignored(f"{folder}/", rules):
            return ()
        rules = (*rules, *_rules_in(folder))
    return () if _is_ignored(f"{root}/", rules) else rules


def _folders_above(root: Path) -> list[Path]:
    """From the root of the repository down to the parent of `root`; empty outside a repository."""
    for depth, folder in enumerate((root, *root.parents)):
        if os.path.exists(folder / ".git"):
            return list(reversed(root.parents[:depth]))
    return []


def _rules_in(folder: Path) -> Iterator[_Rules]:
    path = folder / ".gitignore"
    if not os.path.isfile(path):
        return
    try:
        if path.stat().st_size > MAX_IGNORE_BYTES:
            raise DocumentError(f"{path} has more than {MAX_IGNORE_BYTES:,} bytes; shorten it")
        lines = path.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
    except OSError as error:
        raise DocumentError(
            f"{path} cannot be read ({error.strerror}); make it readable"
        ) from error
    rules = (_rule(line, path) for line in lines)
    yield _Rules(os.path.join(folder, ""), tuple(rule for rule in rules if rule is not None))


def _rule(line: str, path: Path) -> _Rule | None:
    """The rule on a line; None for blanks, comments and, as in git, patterns that make no sense."""
    try:
        from pathspec import GitIgnoreSpec
    except ImportError as error:
        raise missing_library("pathspec", str(path)) from error
    is_for_folders = line.rstrip().endswith("/")
    bare = line.rstrip().rstrip("/") if is_for_folders else line
    try:
        pattern = next(iter(GitIgnoreSpec.from_lines([bare]).patterns), None)
    except ValueError:
        return None
    if pattern is None or pattern.regex is None:
        return None
    if line.count("**") > MAX_DOUBLE_STARS:
        raise DocumentError(f"{path} has a line with more than {MAX_DOUBLE_STARS} `**`; shorten it")
    regex = pattern.regex.pattern.replace("(?P<ps_d>/)", "/$")
    if regex.endswith("/"):
        regex += "."  # what is in the folder, not the folder
    return _Rule(re.compile(_quick(regex)), bool(pattern.include), is_for_folders)


_STAR = r"\[\^/\]\*"
_STAR_AND_TEXT = re.compile(
    rf"{_STAR}((?:\\.|\[\^?\]?(?:\\.|[^\]\\])*\](?!\*)|[^\[\]\\/*()])+)(?={_STAR})"
)


def _quick(regex: str) -> str:
    """The regular expression of a rule, without tries that cannot succeed.

    Of `*a*b*c` each star but the last may take the first match of what is behind it for good; trying the
    others as well takes a time that grows by the length of the name with each star.
    """
    return _STAR_AND_TEXT.sub(r"(?>[^/]*?\1)", regex)


# --- waiting for files to change ------------------------------------------------------------------

# A folder changes when a file in it is written, added or removed. A change counts when nothing has changed for as long
# as one wait, so that a file which is being written is not read halfway.


FileState = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file."""


def state_of(paths: Sequence[Path]) -> FileState:
    """The files as they are now; those that are gone are left out."""
    return tuple(
        (str(file), status.st_size, status.st_mtime_ns)
        for path in paths
        for file, status in _files(path)
    )


async def wait_for_change(paths: Sequence[Path], seen: FileState, *, seconds: float) -> FileState:
    """Wait until the files differ from what was seen, and stay as they are for one more wait."""
    before = seen
    while True:
        await asyncio.sleep(seconds)
        now = await asyncio.to_thread(state_of, paths)
        if now and now != seen and now == before:
            return now
        before = now


def _files(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A file, or the files of a folder, with their status."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in found:
        try:
            status = file.stat()
        except OSError:
            continue
        if file.is_file():
            yield file, status
