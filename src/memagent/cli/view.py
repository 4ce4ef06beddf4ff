"""`memagent view`: runs in a browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memagent.errors import ConfigError
from memagent.files import reason_of, write_atomically
from memagent.plugins import require

if TYPE_CHECKING:
    from memagent.viewer.api import ViewerApi

LIBRARIES = ("fastapi", "uvicorn")


@click.command("view", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("runs", metavar="[RUN]...", nargs=-1)
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True),
    help="A text that runs read, to show its sections and whole prompts; may be given several times.",
)
@click.option(
    "--port",
    default=8700,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 takes any free port.",
)
@click.option(
    "--export",
    "export",
    metavar="FILE.html",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the runs as one page that needs no server, instead of serving them.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in your browser.")
def command(
    runs: tuple[str, ...], texts: tuple[Path, ...], port: int, export: Path | None, opens: bool
) -> None:
    """Show runs in a browser: readings step by step, evaluations, training as it goes on.

    RUN is a run directory, a folder of them, or a name that `memagent runs list` shows; without one,
    all runs of your state folder. Only this machine can connect, and nothing is changed.

    \b
      memagent view
      memagent view runs/ --text book.txt
      memagent view runs/bell --export bell.html
    """
    for library in LIBRARIES:
        require(library, f'memagent view needs {library}; pip install "memagent[viewer]"')
    # imported here: they import FastAPI
    from memagent.viewer.api import ViewerApi
    from memagent.viewer.app import view
    from memagent.viewer.library import Texts, open_library

    api = ViewerApi(open_library(runs), Texts(texts))
    if export is not None:
        _write(api, export)
        return
    view(api, port=port, on_ready=lambda url: _ready(url, opens=opens))


def _write(api: ViewerApi, path: Path) -> None:
    from memagent.viewer.export import export_page

    exported = export_page(api)
    try:
        write_atomically(path, exported.html.encode(), mode=0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {reason_of(error)}") from None
    print(path)
    if exported.num_left_out:
        left = (
            f"{exported.num_left_out:,} traces are left out; name fewer runs to write more of each"
        )
        print(left, file=sys.stderr)


def _ready(url: str, *, opens: bool) -> None:
    print(url, flush=True)
    print("showing runs to this machine only; Ctrl-C ends it", file=sys.stderr, flush=True)
    if opens:
        click.launch(url)
