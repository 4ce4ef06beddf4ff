"""Tests on a Ray cluster of several nodes on this machine; most of them only with `make test-cluster`."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "MEMAGENT_TEST_CLUSTER" in os.environ:
        return
    skip = pytest.mark.skip(reason="only with make test-cluster")
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(skip)
