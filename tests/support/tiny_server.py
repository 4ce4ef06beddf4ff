"""A server over a tiny random model, in a thread of this process.

with serving_tiny(folder) as server:
    openai.OpenAI(base_url=server.base_url, api_key="none")
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from memagent.config import LocalConfig, ServeConfig
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.serve.app import make_app
from memagent.serve.http import serving
from tests.support.timing import wait_until


class TinyServer(NamedTuple):
    engine: LocalEngine
    url: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def serving_tiny(folder: Path, *, cache_gb: float = 0.01, **settings: Any) -> Iterator[TinyServer]:
    """Serve the model in `folder` while the block runs."""
    config = ServeConfig.parse({"port": 0, "drain_seconds": 5.0, **settings})
    with (
        LocalEngine(load(str(folder)), LocalConfig(cache_gb=cache_gb)) as engine,
        serving(partial(make_app, engine, config), config) as url,
    ):
        yield TinyServer(engine, url)


def wait_until_idle(engine: LocalEngine) -> None:
    """Wait until no request runs or waits."""
    wait_until(lambda: not (engine.load.num_running or engine.load.num_waiting))


def num_lost_slots(engine: LocalEngine) -> int:
    """Slots that an idle engine has not freed; cached prompts do not count."""
    engine.weights_changed()  # drops cached prompts, and fails while any is in use
    return engine.load.num_used_slots
