"""Run directories: what is written stays, what is torn is dropped, what is damaged is refused."""

import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memagent.errors import RunError, RunNotWritable
from memagent.runs import Run, read_manifest, read_records


def new_run(path: Path) -> Run:
    return Run.create(path, {"kind": "test", "value": 1})


def test_records_come_back_in_order(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        for number in range(3):
            run.append(json.dumps({"n": number}).encode())
    with Run.open(tmp_path / "run") as run:
        assert run.records == [{"n": 0}, {"n": 1}, {"n": 2}]
        assert run.manifest["value"] == 1


def test_each_record_is_on_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(
        "memagent.run_files._sync_data",
        lambda descriptor: synced.append(os.fstat(descriptor).st_size),
    )
    with new_run(tmp_path / "run") as run:
        run.append(b'{"n":0}')
        run.append(b'{"n":1}')
    assert synced == [25, 50]  # with a checksum of 17 bytes each


@pytest.mark.parametrize("torn", [b'{"n":', b'{"n":1', b"\x00\x00\x00", b"{"])
def test_a_torn_last_line_is_dropped_and_the_next_append_is_clean(
    tmp_path: Path, torn: bytes
) -> None:
    with new_run(tmp_path / "run") as run:
        run.append(b'{"n":0}')
    with (tmp_path / "run" / "steps.jsonl").open("ab") as file:
        file.write(torn)
    assert read_records(tmp_path / "run") == [{"n": 0}]
    with Run.open(tmp_path / "run") as run:
        assert run.records == [{"n": 0}]
        run.append(b'{"n":1}')
    assert read_records(tmp_path / "run") == [{"n": 0}, {"n": 1}]


def test_a_damaged_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    new_run(tmp_path / "run").close()
    (tmp_path / "run" / "steps.jsonl").write_bytes(b'{"n":0}\n{broken\n{"n":2}\n')
    with pytest.raises(RunError, match="line 2, is damaged"):
        Run.open(tmp_path / "run")


def test_a_run_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with pytest.raises(RunError, match="in use"):
        Run.open(tmp_path / "run")
    run.close()
    Run.open(tmp_path / "run").close()


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    new_run(tmp_path / "run").close()
    with pytest.raises(RunError, match="already holds a run; resume it, or name another folder"):
        new_run(tmp_path / "run")


def test_a_folder_with_steps_but_no_manifest_is_not_taken_for_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"n":0}\n')
    with pytest.raises(RunError, match=r"run\.json is gone"):
        new_run(tmp_path)


def test_a_line_that_does_not_fit_the_disk_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with new_run(tmp_path / "run") as run:
        run.append(b'{"n":0}')
        with monkeypatch.context() as patched:
            patched.setattr("memagent.run_files.write_all", full_disk)
            with pytest.raises(RunError, match="No space left on device"):
                run.append(b'{"n":1}')
        run.append(b'{"n":2}')
    assert read_records(tmp_path / "run") == [{"n": 0}, {"n": 2}]


def test_files_are_kept_beside_the_manifest(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", {}, files={"stdin": b"text"}).close()
    assert (tmp_path / "run" / "stdin").read_bytes() == b"text"


def test_a_new_run_without_records_can_be_discarded(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {}, files={"stdin": b"text"})
    assert run.discard_if_empty()
    assert not (tmp_path / "run").exists()


def test_discarding_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    assert Run.create(tmp_path, {}).discard_if_empty()
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_run_with_records_is_not_discarded(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        run.append(b"{}")
        assert not run.discard_if_empty()
    assert read_records(tmp_path / "run") == [{}]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no run"), ("{", "cannot read"), ('{"format": 99}', "format"), ("[]", "format")],
)
def test_a_folder_that_is_no_run_says_why(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=message):
        read_manifest(tmp_path)


def test_only_the_user_can_read_a_run(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        run.append(b"{}")
    modes = {file.name: file.stat().st_mode & 0o077 for file in (tmp_path / "run").iterdir()}
    assert modes["run.json"] == modes["steps.jsonl"] == 0
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


def test_a_new_run_to_which_nothing_was_written_is_removed(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {}, files={"stdin": b"text"})
    assert run.discard_if_empty()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["steps.jsonl", "metrics.jsonl"])
def test_a_run_to_which_anything_was_written_is_kept(tmp_path: Path, name: str) -> None:
    run = new_run(tmp_path / "run")
    (tmp_path / "run" / name).write_text("{}\n")
    assert not run.discard_if_empty()
    assert (tmp_path / "run" / "run.json").exists()
    run.close()


def test_a_removed_run_leaves_other_files_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert new_run(tmp_path).discard_if_empty()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_may_be_closed_in_another_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(Run.create, tmp_path / "run", {"kind": "test"}).result()
    run.close()
    Run.open(tmp_path / "run").close()


def test_a_run_stays_locked_when_its_lock_file_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "run"
    opened = (
        f"from memagent.runs import Run; from pathlib import Path; Run.open(Path({str(path)!r}))"
    )
    with Run.create(path, {"kind": "ask"}):
        (path / ".lock").unlink()
        done = subprocess.run(
            [sys.executable, "-c", opened], capture_output=True, text=True, check=False
        )
        assert done.stderr.endswith(f": {path} is in use by another memagent process\n")
    assert subprocess.run([sys.executable, "-c", opened], check=False).returncode == 0


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_that_is_deleted_while_it_is_written_to_is_noticed(
    tmp_path: Path, is_replaced: bool
) -> None:
    path = tmp_path / "run"
    with Run.create(path, {"kind": "ask"}) as run:
        run.check_kept()
        run.append(b"{}")
        run.check_kept()
        path.rename(tmp_path / "elsewhere")
        if is_replaced:
            shutil.copytree(tmp_path / "elsewhere", path)
        with pytest.raises(RunNotWritable, match="was deleted or replaced"):
            run.check_kept()
        run.append(b"{}")  # the work goes on: its result is shown


def test_a_manifest_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="ask less in one run"):
        Run.create(tmp_path / "run", {"questions": ["x" * (32 << 20)]})
    assert not (tmp_path / "run").exists()
