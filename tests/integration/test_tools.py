"""Commands around the reader: doctor, profiles, completion."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.integration.conftest import CODE, FACT, MEMAGENT, QUESTION, Cli, Outcome

Call = Callable[..., Outcome]


def test_doctor_prints_findings_as_text_and_as_json(here: Call) -> None:
    done = here("doctor")
    assert (done.code, done.stderr) == (0, "")
    assert "\nengines\n" in done.stdout
    assert "  ok  scripted" in done.stdout
    findings = json.loads(here("doctor", "--json").stdout)
    assert {finding["area"] for finding in findings} >= {"system", "extras", "engines", "folders"}


def test_a_profile_gives_the_settings_of_a_reading(here: Call, tmp_path: Path) -> None:
    (tmp_path / "memagent").mkdir()
    config = tmp_path / "memagent" / "config.toml"
    config.write_text(
        '[profiles.small]\nengine = "scripted"\ntokenizer = "bytes"\nchunk_tokens = 300\n'
    )
    book = tmp_path / "book.txt"
    book.write_text(f"{'The harbour was quiet. ' * 60}\n\n{FACT}\n")
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    done = here("ask", book, "-q", QUESTION, "--profile", "small", "--json", env=env)
    assert done.code == 0, done.stderr
    told = json.dumps(json.loads(done.stdout))
    assert CODE in told
    assert told.count('"kind": "read"') > 3
    done = here("ask", book, "-q", QUESTION, "--profile", "smalll", env=env)
    assert done.code == 2
    assert f"there is no profile 'smalll' in {config}; did you mean small?" in done.stderr
    done = here("ask", book, "-q", QUESTION, env={**env, "MEMAGENT_PROFILE": "small"})
    assert CODE in done.stdout


def test_commands_and_options_are_completed(cli: Cli) -> None:
    def completed(words: str, place: int) -> list[str]:
        env = {"COMP_WORDS": words, "COMP_CWORD": str(place), "_MEMAGENT_COMPLETE": "bash_complete"}
        done = subprocess.run(
            [MEMAGENT], env=cli.environment(env), capture_output=True, text=True, timeout=60
        )
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert completed("memagent do", 1) == ["doctor"]
    assert completed("memagent ask --chunk", 2) == ["--chunk-tokens"]
