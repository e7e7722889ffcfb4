"""The one Ray of all tests in this folder."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.cli import QUIET_ENVIRONMENT
from tests.chat_server import KEY

KEYS = {"SPD_TEST_KEY": KEY, "SPD_WRONG_KEY": "wrong"}
"""What the workers of tests/ray/test_label.py find in their environment."""


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Path]:
    """A local Ray of 4 logical CPUs for the whole pytest process; gives its temporary folder.

    The folder's path is short (Unix sockets lie in it). With no dashboard, Ray Train floods the log.
    """
    os.environ.update(QUIET_ENVIRONMENT)
    import ray

    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="spd"))
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=True,
        dashboard_port=free_port(),
        object_store_memory=200 * 2**20,
        logging_level="warning",
        _temp_dir=str(folder),
        runtime_env={"env_vars": QUIET_ENVIRONMENT | KEYS},
    )
    yield folder
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
