"""`memagent completion`: the shell completes commands and options."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from memagent.cli.shared.terminal import escaped_for
from memagent.errors import ConfigError
from memagent.files import reason_of, write_atomically

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MEMAGENT_COMPLETE"
"""Set by the script when the shell asks for completions."""


@click.command("completion", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.option("--install", is_flag=True, help="Write the script where the shell finds it.")
@click.pass_context
def command(context: click.Context, shell: str | None, install: bool) -> None:
    """Print the script that lets your shell complete memagent's commands and options, or install it.
    Without SHELL it is for the shell in $SHELL.

    \b
      memagent completion --install
      memagent completion zsh > ~/.zfunc/_memagent
    """
    shell = shell or _current_shell()
    script = script_for(shell, context.find_root().command)
    if not install:
        click.echo(script)
        return
    path = place_of(shell)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, script.encode(), mode=0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {reason_of(error)}") from None
    print(escaped_for(sys.stdout, str(path)))
    print(f"{_next_step(shell)}", file=sys.stderr)


def script_for(shell: str, app: click.Command) -> str:
    """The script of a shell, as click makes it."""
    made = get_completion_class(shell)
    assert made is not None, f"click completes for {shell}"
    complete = made(app, {}, "memagent", VARIABLE)
    return str(complete.source_template % complete.source_vars())


def place_of(shell: str) -> Path:
    """Where a shell looks for scripts of a user."""
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return {
        "bash": data / "bash-completion" / "completions" / "memagent",
        "zsh": home / ".zfunc" / "_memagent",
        "fish": config / "fish" / "completions" / "memagent.fish",
    }[shell]


def _next_step(shell: str) -> str:
    if shell == "zsh":
        return "add to ~/.zshrc: fpath=(~/.zfunc $fpath); autoload -U compinit; compinit"
    if shell == "bash":
        return "open a new shell; it needs the package bash-completion"
    return "open a new shell"


def _current_shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise ConfigError(f"name your shell: {', '.join(SHELLS)}")
    return name
