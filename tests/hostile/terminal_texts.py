"""Texts that a terminal, a spreadsheet or a page of Markdown would obey. Each is a function of a seed."""

import random

SEQUENCES = (
    "\x1b]0;owned\x07",  # title
    "\x1b]52;c;b3duZWQ=\x07",  # clipboard
    "\x1b]8;;http://evil.example\x1b\\here\x1b]8;;\x1b\\",  # link
    "\x1b[2J\x1b[H",  # clears the screen
    "\x1b[1A\x1b[2K",  # overwrites the line above
    "\x1b[8m",  # hides text
    "\x1b[6n",  # makes the terminal answer
    "\x1bP$q\x1b\\",
    "\x9b31m",
    "\x90q",
    "\r",
    "\x07",
    "\x08" * 5,
    "\x7f",
    "\x00",
    "\u202etxt.exe",
    "\u2066\u2069",
    "\u200f",
    "\u061c",
    "\u2028",
)
FORMULAS = ("=HYPERLINK(1)", "+1+1", "-2+3", "@SUM(A1)", " =1", "\t=1", "\uff1d1")
MARKDOWN = (
    "a|b",
    "a\\|b",
    "a\\\\|b",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</td>",
    "<!--",
    "![x](http://evil.example/x.png)",
    "[x](javascript:alert(1))",
    "[x][y]",
    "```",
    "# heading",
    "a\nb",
    "a\n\n| b |",
)


def hostile_line(seed: int) -> str:
    """Words between sequences; the same for the same seed."""
    rng = random.Random(seed)
    pieces = [rng.choice((*SEQUENCES, "word", " ", "\n", "\t", "é", "漢")) for _ in range(12)]
    return rng.choice(("", *FORMULAS, *MARKDOWN)) + "".join(pieces)
