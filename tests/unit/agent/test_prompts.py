"""Prompts: order of the parts, slots, and a user's own templates."""

from pathlib import Path

import pytest

from memagent.agent.prompts import PROMPT_SETS, fill, open_prompts
from memagent.errors import ConfigError


def read_prompt(name: str, **values: object) -> str:
    given = {
        "question": "QQ",
        "section": "SS",
        "memory": "MM",
        "section_number": 7,
        "memory_tokens": 1024,
        **values,
    }
    (message,) = PROMPT_SETS[name].section_messages(**given)  # type: ignore[arg-type]
    return message["content"]


def test_prompts_with_different_memories_share_everything_up_to_the_section() -> None:
    first, second = read_prompt("default", memory="MM"), read_prompt("default", memory="NN")
    assert first[: first.index("MM")] == second[: second.index("NN")]
    assert "SS" in first[: first.index("MM")]


def test_slots_are_filled_in_one_pass() -> None:
    values = {"question": "{memory}", "memory": "{question}"}
    assert fill("{question} {memory} {{question}} {}", values) == (
        "{memory} {question} {question} {}"
    )


OWN = """
system = "You are terse."
empty_memory = "nothing"
read = "{question}|{section}|{memory}|\\\\boxed{}"
answer = "{question}|{memory}"
"""


def test_a_users_own_template_file_is_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(OWN)
    prompts = open_prompts(str(file))
    assert prompts.name == "mine"
    messages = prompts.section_messages(
        question="q", section="s", memory="", section_number=1, memory_tokens=8
    )
    assert messages == [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "q|s|nothing|\\boxed{}"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('read = "{question}{section}"\nanswer = "{question}{memory}"', r"read lacks .*\{memory\}"),
        ('read = "{question}{section}{memory}"', "template 'answer' is missing"),
        (OWN.replace("{section}", "{secton}"), r"unknown slot \{secton\}; did you mean section\?"),
        (OWN + 'reed = "x"', "unknown key 'reed'; did you mean read?"),
        (OWN.replace('"nothing"', "3"), "empty_memory must be a string"),
        ("read = ", "cannot read the prompts"),
    ],
)
def test_a_wrong_template_file_is_explained(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(content)
    with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace(r"\\?", r"\?")):
        open_prompts(str(tmp_path / "mine.toml"))


def test_an_unknown_set_is_answered_with_the_nearest_or_all() -> None:
    with pytest.raises(ConfigError, match=r"'papper'; did you mean paper\?"):
        open_prompts("papper")
    with pytest.raises(ConfigError, match="known: add, boxed, compact"):
        open_prompts("nothing-like-it")


def test_the_fingerprint_follows_the_wording_not_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(OWN)
    (tmp_path / "b.toml").write_text(OWN)
    (tmp_path / "c.toml").write_text(OWN.replace("terse", "brief"))
    a, b, c = (open_prompts(str(tmp_path / f"{name}.toml")) for name in "abc")
    assert a.sha256 == b.sha256 != c.sha256


@pytest.mark.parametrize(
    ("old", "new", "reply"),
    [
        ("", "", "No change."),
        ("a\nb", "a\nb", "No change."),
        ("", "a", "a"),
        ("a", "a\nb\nc", "b\nc"),
        ("a\nb", "a\nc", "New memory:\na\nc"),
    ],
)
def test_the_reply_for_a_new_memory_adds_where_it_can(old: str, new: str, reply: str) -> None:
    assert open_prompts("add").reply_for(old, new) == reply
    assert open_prompts("keep").reply_for(old, new) == ("No change." if old == new else new)


def test_a_reply_is_read_as_the_prompts_offer_it() -> None:
    adding, replacing = open_prompts("add"), open_prompts("default")
    assert adding.change_of("a fact") == ("add", "a fact")
    assert adding.change_of("new memory: a fact") == ("replace", "a fact")
    assert adding.change_of("no change") == ("keep", "")
    assert replacing.change_of("New memory: a fact") == ("replace", "New memory: a fact")


def test_a_new_memory_that_only_leaves_lines_out_keeps_the_old_one() -> None:
    adding, replacing = open_prompts("add"), open_prompts("default")
    assert adding.change_of("New memory:\nb", "a\nb\nc") == ("keep", "")
    assert adding.change_of("New memory:\nc\na", "a\nb\nc") == ("keep", "")
    assert adding.change_of("New memory:\nb\nd", "a\nb\nc") == ("replace", "b\nd")
    assert adding.change_of("New memory:", "a") == ("replace", ""), "as empty replies are treated"
    assert replacing.change_of("b", "a\nb\nc") == ("replace", "b")
