"""How much a test tries: little with the other tests, much with `make test-hostile`."""

import os

IS_LARGE = os.environ.get("MEMAGENT_TEST_HOSTILE") == "1"


def sized(small: int, large: int) -> int:
    """The larger number where much is tried."""
    return large if IS_LARGE else small
