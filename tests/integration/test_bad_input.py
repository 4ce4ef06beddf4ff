"""Bad input ends with code 2 and one line that tells what to change."""

import io
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import fpdf
import pypdf
import pytest

from tests.integration.conftest import FACT, QUESTION, SMALL_SECTIONS, Cli, Outcome, story
from tests.support.loopback import running

ROOT = Path(__file__).resolve().parents[2]
ASKED = ("-q", QUESTION)
Call = Callable[..., Outcome]
READ_SLOTS = "{question} {section} {memory}"
PYTHON_RUN = {
    "format": 1,
    "kind": "ask",
    "questions": ["What?"],
    "document": {"source": "text", "sha256": "0" * 64, "num_chars": 3},
    "model": "scripted",
    "tokenizer": "bytes",
    "prompts": {"name": "default", "sha256": "0" * 64},
    "agent": {},
}
"""The manifest of a run that no command started."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What stands for LIVE, GUARDED, ... in the cases below: endpoints of several tempers."""
    folder = tmp_path_factory.mktemp("logs")
    tempers: dict[str, dict[str, object]] = {
        "LIVE": {},
        "GUARDED": {"api_key": "the-right-key"},
        "NARROW": {"max_model_len": 2048},
        "STERN": {"context_window": 100},
    }
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(running(log=folder / name, **temper)).base_url
            for name, temper in tempers.items()
        }


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Files of all sorts of badness, and a good one."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "good.txt").write_text(story(600, seed=1, fact=FACT))
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.txt").write_bytes(b" \n\n ")
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(range(256)) * 8)
    (folder / "latin.txt").write_bytes("Ein Café in Köln".encode("latin-1"))
    (folder / "binaries").mkdir()
    (folder / "binaries" / "a.bin").write_bytes(bytes(range(256)))
    (folder / "nothing").mkdir()
    (folder / "scanned.pdf").write_bytes(pdf_bytes(None))
    (folder / "locked.pdf").write_bytes(locked(pdf_bytes("A secret.")))
    (folder / "broken.pdf").write_bytes(pdf_bytes("Some text.")[:300])
    (folder / "broken.gz").write_bytes(b"\x1f\x8b\x08\0 and no more")
    (folder / "slot.toml").write_text(f'read = "{READ_SLOTS} {{sektion}}"\nanswer = "{{memory}}"')
    (folder / "lacks.toml").write_text('read = "{question} {section}"\nanswer = "{memory}"')
    (folder / "half.toml").write_text(f'read = "{READ_SLOTS}"')
    (folder / "key.toml").write_text(f'read = "{READ_SLOTS}"\nanswre = "{{memory}} {{question}}"')
    (folder / "broken.toml").write_text("read = ")
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text(json.dumps(PYTHON_RUN))
    (folder / "damaged_run").mkdir()
    (folder / "damaged_run" / "run.json").write_text('{"format": 1')
    (folder / "old_run").mkdir()
    (folder / "old_run" / "run.json").write_text('{"format": 0}')
    return folder


def pdf_bytes(text: str | None) -> bytes:
    """A page with a text, or with a line drawn on it."""
    document = fpdf.FPDF()
    document.add_page()
    document.set_font("Helvetica", size=12)
    if text is None:
        document.line(10, 10, 100, 100)
    else:
        document.cell(text=text)
    return bytes(document.output())


def locked(pdf: bytes) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf))
    writer.encrypt("open sesame", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


# Each case: what is typed after `memagent ask`, and words that the line on standard error must have.
# Relative paths start in `inputs`; small sections and the endpoint LIVE are given where a case does
# not say otherwise. ASKED is a question.

CASES = r"""
# texts
bok.txt ASKED => bok.txt does not exist in
goood.txt ASKED => did you mean good.txt?
http://example.org/a.txt ASKED => is a web address; download it
empty.txt ASKED => empty.txt is empty
blank.txt ASKED => blank.txt holds no text
photo.jpg ASKED => photo.jpg is binary, not text; if it shows text, make a pdf
binaries/a.bin ASKED => a.bin is binary, not text; if it is UTF-16 text, give --set encoding=utf-16-le
binaries ASKED => binaries has no readable text files (1 skipped
nothing ASKED => nothing has no readable text files (none)
latin.txt ASKED --set encoding=utf-8 => latin.txt is not utf-8: byte 7
good.txt ASKED --set encoding=utf-9 => no text encoding named 'utf-9'
scanned.pdf ASKED => scanned.pdf has 1 page and no text
locked.pdf ASKED => locked.pdf is protected by a password
broken.pdf ASKED => broken.pdf is not a readable pdf file
broken.gz ASKED => broken.gz is not a readable gzip file
ASKED => name at least one file or folder
# questions
good.txt => ask something: -q QUESTION
good.txt 'Who has the key?' => 'Who has the key?' is no file; ask it as a question with -q
good.txt --questions none.jsonl => the questions in none.jsonl cannot be read: No such file or directory
good.txt --questions latin.txt => the questions in latin.txt are not UTF-8 text
good.txt -q '  ' => the question is empty
good.txt -q '' --dry-run => the question is empty
good.txt ASKED -q '' => the question is empty
# sizes
good.txt ASKED --window 2048
    => do not fit a window of 2048; lower --chunk-tokens to 296, or raise --window to 2152
good.txt ASKED --chunk-tokens 3000 => do not fit a window of 4096; lower --chunk-tokens to
good.txt ASKED --set memory_tokens=5000
    => --set memory_tokens=5000 does not fit a window of 4096 tokens; lower --set memory_tokens or raise --window
good.txt ASKED --chunk-tokens 5000 => --chunk-tokens 5000 does not fit a window of 4096 tokens
good.txt ASKED --window 0 => window:
good.txt ASKED --base-url NARROW
    => test-model has a window of 2048 tokens, less than --window 4096; give --window 2048
good.txt ASKED --base-url STERN
    => the prompt is too long for test-model (HTTP 400: This model's maximum context length is 100
# endpoints
good.txt ASKED --model test-model --base-url NONE => no endpoint is set; give --base-url
good.txt ASKED --set timeout=5 --base-url NONE => no endpoint is set; give --base-url
good.txt ASKED --set device=cpu => --set device does not go with the engine 'openai:'
good.txt ASKED --engine local:smollm2-135m --set timeout=5
    => memagent: --base-url, --set timeout does not go with the engine 'local:smollm2-135m'
good.txt ASKED --base-url localhost:8000/v1
    => 'localhost:8000/v1' is no endpoint address; it looks like http://localhost:8000/v1
good.txt ASKED --base-url http:// => 'http://' is no endpoint address
good.txt ASKED --base-url http://localhost:port/v1
    => the address of the endpoint is not valid: Port could not be cast to integer value as 'port'
good.txt ASKED --base-url http://me:hidden@localhost/v1
    => leave user and password out of the address http://localhost/v1
good.txt ASKED --model tset-model => has no model 'tset-model'; use --model with one of: test-model
good.txt ASKED --base-url GUARDED --model test-model --set api_key=wrong
    => refused the key (HTTP 401: Incorrect API key provided.); give --set api_key, or MEMAGENT_API_KEY with MEMAGENT_BASE_URL
good.txt ASKED --base-url GUARDED
    => refused the key (HTTP 401: Incorrect API key provided.); give --set api_key, or MEMAGENT_API_KEY with MEMAGENT_BASE_URL
good.txt ASKED --base-url LIVE/nowhere --model other => /v1/nowhere has no model 'other'
good.txt ASKED --engine opanai:x => unknown engine 'opanai'; did you mean openai?
good.txt ASKED --engine scriptd => unknown engine 'scriptd'; did you mean scripted?
good.txt ASKED --base-url http://127.0.0.1:9/v1 => http://127.0.0.1:9/v1 cannot be reached (
good.txt ASKED --engine openai:a --model b => give either --engine KIND:MODEL or --model, not both
# options
good.txt ASKED --windwo 9 => No such option '--windwo'; did you mean '--window'? See `memagent ask --help`
good.txt ASKED --window many => 'many' is not a valid int
good.txt ASKED --set 'extra_body={top_k: 20}' => is not a JSON object, such as
good.txt ASKED --set 'extra_body={"x": NaN}' => extra_body: must be a finite number of at most 1,000,000,000
good.txt ASKED --set 'extra_body=[1]' => '[1]' is not a JSON object
good.txt ASKED --set temperature=-1 => temperature:
good.txt ASKED --max-calls 0 => '--max-calls': 0 is not in the range x>=1
good.txt ASKED --max-cost 1 => a limit on cost needs prices; give --set price_in and --set price_out
good.txt ASKED --tokenizer ./none/here => ./none/here
good.txt ASKED --tokenizer ./nothing => nothing holds no tokenizer.json; name a folder that does
good.txt ASKED --tokenizer tiktoken:none => tiktoken knows no encoding or model 'none'; encodings:
good.txt ASKED --prompts none.toml => no prompt set or template file
good.txt ASKED --prompts slot.toml => read has an unknown slot {sektion}; did you mean section?
good.txt ASKED --prompts lacks.toml => read lacks the slot {memory}
good.txt ASKED --prompts half.toml => the template 'answer' is missing
good.txt ASKED --prompts key.toml => unknown key 'answre'; did you mean answer?
good.txt ASKED --prompts broken.toml => cannot read the prompts in
# runs
--resume none => none holds no run: there is no run.json in it
--resume nothing => nothing holds no run: there is no run.json in it
--resume good.txt => good.txt is not a run directory
--resume damaged_run => cannot read damaged_run/run.json
--resume old_run => a format this version of memagent does not know
--resume run => this run was begun from Python
--resume run --run-dir b => give --resume to resume a run or
good.txt ASKED --run-dir run => run already holds a run; resume it, or name another folder
good.txt ASKED --run-dir '' => Invalid value for '--run-dir': the path is empty; name one, or leave it out
good.txt ASKED --run-dir blank.txt => blank.txt is a file
"""


def cases() -> Iterator[tuple[list[str], str]]:
    for line in CASES.replace("\n    =>", " =>").splitlines():
        typed, arrow, remedy = line.partition(" => ")
        if arrow:
            parts = ([*ASKED] if part == "ASKED" else [part] for part in shlex.split(typed))
            yield [*chain.from_iterable(parts)], remedy
    yield ["good.txt", "-q", "Who is \udce9?"], "the question is not valid Unicode"
    too_long = "the question has 3999 tokens and 1975 fit a window of 4096"
    yield ["good.txt", "-q", "why " * 1000], too_long


@pytest.mark.parametrize(("typed", "remedy"), [*cases()])
def test_bad_input_gives_code_2_and_one_line_with_the_remedy(
    here: Call, cli: Cli, inputs: Path, words: dict[str, str], typed: list[str], remedy: str
) -> None:
    defaults = () if "--resume" in typed else SMALL_SECTIONS
    address = () if "NONE" in typed else ("--base-url", words["LIVE"])
    own = [argument for argument in typed if argument != "NONE"]
    if "NONE" in typed:
        own.remove("--base-url")
    outcome = here("ask", *defaults, *address, *(in_words(part, words) for part in own), cwd=inputs)

    assert_one_line(outcome, remedy)
    assert "hidden" not in outcome.stderr
    assert cli.runs == [], "nothing was read, so there is nothing to keep"


LARGE = "99999999999999"
TINY = str(ROOT / "configs" / "train" / "tiny_cpu.toml")
EVAL = "eval smoke --engine scripted --set tokenizer=bytes"
LARGE_NUMBERS = [
    (f"plan {TINY} --text-tokens {LARGE}", "text_tokens: input should be less than or equal to"),
    (f"plan {TINY} --text-tokens 1000000000", "sections, and at most 100,000 can be planned"),
    (f"plan {TINY} --gpus {LARGE}", "is not in the range 1<=x<=16384"),
    (
        f"plan {TINY} --set cluster.engine_replicas={LARGE}",
        "cluster.engine_replicas: input should be less than or equal to 16384",
    ),
    (
        f"data build ruler/vt --tokens {LARGE} --num 1 --out x.jsonl",
        "tokens: input should be less than or equal to 1000000000",
    ),
    (
        f"data build small/colours --num {LARGE} --out x.jsonl",
        "a dataset has 1 to 1,000,000,000 examples; change --num",
    ),
    (
        "data build small/colours --num 9999 --processes 9999 --out x.jsonl",
        "--processes 9999 is too many; give at most 1024",
    ),
    (f"{EVAL} --num {LARGE}", "num: input should be less than or equal to 1000000"),
    (f"{EVAL} --samples {LARGE}", "samples: input should be less than or equal to 1000000"),
    (f"{EVAL} --processes {LARGE}", f"--processes {LARGE} is too many; give at most 1024"),
]


@pytest.mark.parametrize(("typed", "remedy"), LARGE_NUMBERS)
def test_numbers_that_no_machine_can_serve_are_refused_at_once(
    here: Call, typed: str, remedy: str
) -> None:
    assert_one_line(here(*typed.split()), remedy)


def test_questions_of_a_windows_editor_are_read(here: Call, inputs: Path) -> None:
    (inputs / "questions.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(QUESTION).encode())
    outcome = here(
        *("ask", "good.txt", "--questions", "questions.jsonl", "--engine", "scripted"),
        *SMALL_SECTIONS,
        cwd=inputs,
    )
    assert (outcome.code, outcome.stdout) == (0, f"{FACT}\n")


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        (["-"], "standard input is empty"),
        (["-", "-"], "standard input (-) can be read only once"),
        (["none.txt"], "none.txt does not exist in "),
    ],
)
def test_bad_standard_input_gives_code_2_and_one_line_with_the_remedy(
    cli: Cli, inputs: Path, words: dict[str, str], typed: list[str], remedy: str
) -> None:
    assert_one_line(cli("ask", *typed, *ASKED, "--base-url", words["LIVE"], cwd=inputs), remedy)


def assert_one_line(outcome: Outcome, remedy: str) -> None:
    assert remedy in outcome.stderr
    assert outcome.said[0].startswith("memagent: ")
    assert len(outcome.said) == 1, outcome.stderr
    assert (outcome.code, outcome.stdout) == (2, "")


def in_words(argument: str, words: dict[str, str]) -> str:
    name, slash, rest = argument.partition("/")
    return words.get(name, name) + slash + rest


def test_a_refused_first_call_leaves_a_folder_of_the_user_as_it_was(
    here: Call, inputs: Path, words: dict[str, str]
) -> None:
    before = {path: path.read_bytes() for path in inputs.rglob("*") if path.is_file()}
    command = ("ask", "good.txt", *ASKED, *SMALL_SECTIONS, "--model", "none", "--run-dir", ".")
    outcome = here(*command, "--base-url", words["LIVE"], cwd=inputs)

    assert outcome.code == 2
    assert {path: path.read_bytes() for path in inputs.rglob("*") if path.is_file()} == before
