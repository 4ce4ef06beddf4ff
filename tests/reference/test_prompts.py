"""The wording of every prompt, byte for byte: models are trained and compared on it.

Each file of `prompts/` is one conversation with fixed values in its slots. To change a prompt on purpose:

    python -m tests.reference.test_prompts        # writes the files again; review the diff
"""

from pathlib import Path

import pytest

from memagent.agent.prompts import PROMPT_SETS
from memagent.eval import prompts as methods
from memagent.rl.agents import calculator, single
from memagent.types import Message

FOLDER = Path(__file__).with_name("prompts")
QUESTION = "Who inherits the house?"
SECTION = "In 1898 the house went to Hedda {who is named here}.\n\nNobody objected."
MEMORY = "The house is in Bergen."


def conversations() -> dict[str, list[Message]]:
    """Every prompt of the package, by the name of its file."""
    found: dict[str, list[Message]] = {}
    for name, prompts in PROMPT_SETS.items():
        for state, memory in (("first", ""), ("later", MEMORY)):
            found[f"{name}.read_{state}"] = prompts.section_messages(
                question=QUESTION,
                section=SECTION,
                memory=memory,
                section_number=7,
                memory_tokens=1024,
            )
        found[f"{name}.answer"] = prompts.answer_messages(
            question=QUESTION, memory=MEMORY, num_sections=12, answer_tokens=200
        )
    for name in ("default", "compact"):  # the others have the wording of one of them
        prompts = PROMPT_SETS[name]
        found[f"{name}.note"] = prompts.section_messages(
            is_parallel=True,
            question=QUESTION,
            section=SECTION,
            memory=MEMORY,
            section_number=7,
            memory_tokens=1024,
        )
        found[f"{name}.merge"] = prompts.merge_messages(
            question=QUESTION, notes=[("3-4", MEMORY)], memory="", memory_tokens=1024
        )
    found["closed_book"] = methods.messages(methods.CLOSED_BOOK, question=QUESTION)
    for name in ("DIRECT", "RETRIEVED", "REFINE", "MAP", "COLLAPSE", "REDUCE"):
        found[f"eval.{name.lower()}"] = methods.messages(
            getattr(methods, name),
            question=QUESTION,
            text=SECTION,
            draft=methods.NO_DRAFT,
            number="7",
            words="150",
        )
    found["agent.calculator"] = [{"role": "system", "content": calculator.SYSTEM}]
    found["agent.single"] = [{"role": "user", "content": single.DEFAULTS.request}]
    return found


def as_text(messages: list[Message]) -> str:
    """A conversation as it stands in a file; the last line break is not part of the content."""
    return "".join(f"=== {one['role']} ===\n{one['content']}\n" for one in messages)


@pytest.mark.parametrize("name", sorted(conversations()))
def test_the_wording_of_a_prompt_does_not_change(name: str) -> None:
    expected = (FOLDER / f"{name}.txt").read_bytes()
    assert as_text(conversations()[name]).encode() == expected


def test_every_file_is_the_wording_of_a_prompt() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(conversations())


def test_the_fingerprints_that_runs_keep_do_not_change() -> None:
    assert {name: prompts.sha256[:16] for name, prompts in PROMPT_SETS.items()} == {
        "default": "58257937c2aab950",
        "boxed": "4cae50685b3204fd",
        "paper": "a77c493a32206769",
        "keep": "f0d8c164622a93d1",
        "add": "9a2e1cc4db0caedd",
        "shared": "7b0aff5e5e92c3c8",
        "small": "2d57558a2d8a76a3",
        "compact": "a534a346eb394160",
        "compact_add": "cf48aff4192397db",
    }
    assert {prompts.merging_sha256[:16] for prompts in PROMPT_SETS.values()} == {
        "c601c7474bed968b",
        "578ccdcebdc24641",
    }
    assert methods.fingerprint()[:16] == "478aa2bcdc0301db"


if __name__ == "__main__":
    for title, conversation in conversations().items():
        (FOLDER / f"{title}.txt").write_bytes(as_text(conversation).encode())
