"""Take the screenshots of the viewer in docs/images: view-reading.png and so on.

python tools/picture_viewer.py

Needs Chromium. The runs are made for the pictures, without a model.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import chdir
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memagent.viewer.api import ViewerApi  # noqa: E402
from memagent.viewer.app import viewing  # noqa: E402
from memagent.viewer.library import Library  # noqa: E402
from tests.support.browser import Browser  # noqa: E402
from tests.support.viewer_runs import (  # noqa: E402
    make_evaluation,
    make_reading,
    make_training,
    read_story,
    wondering_reply,
)

IMAGES = ROOT / "docs" / "images"
WIDTH = 1180
READY = "document.querySelector('.detail .prose, .rollout, table.cells, tr.row')"


def main() -> None:
    """Make the runs and take the pictures."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        base = Path(folder)
        make_reading(base / "runs" / "bell")
        make_evaluation(base / "runs" / "hotpotqa-and-ruler", num=40, suite="HotpotQA and RULER")
        make_training(base / "runs" / "reader-135m", num_steps=60)
        with chdir(base):  # the page names the file as it was given
            read = read_story(Path(), mode="parallel", window=3600, script=wondering_reply)
        (base / "run").rename(base / "runs" / "rounds")
        last = max(step.index for step in read.trace.steps if step.kind == "merge")
        api = ViewerApi(Library([base / "runs"]))
        ids = {run["name"]: run["id"] for run in api.runs()["runs"]}
        pages = {
            "reading": (f"#/run/{ids['bell']}?step=9", 760, False),
            "rounds": (f"#/run/{ids['rounds']}?step={last}", 640, False),
            "evaluation": (f"#/run/{ids['hotpotqa-and-ruler']}", 820, False),
            "training": (f"#/run/{ids['reader-135m']}", 1240, True),
        }
        with viewing(api) as url, Browser(base) as browser:
            for name, (address, height, dark) in pages.items():
                page = browser.open(f"{url}/{address}", width=WIDTH, height=height, dark=dark)
                page.wait_for(READY)
                assert page.problems == []
                page.screenshot(IMAGES / f"view-{name}.png")


if __name__ == "__main__":
    main()
