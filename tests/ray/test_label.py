"""Labelling through Ray against a real HTTP server, and by a real autoregressive ranker."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jobs import label
from jobs.cli import QUIET_ENVIRONMENT
from jobs.label_config import LabelConfig
from spd.config import load_config
from spd.datasets.files import read_slates, write_slates
from spd.errors import ConfigError
from tests.chat_server import KEY, ChatServer
from tests.conftest import build_tiny_teacher, make_slate

pytestmark = pytest.mark.ray

NUM_SLATES = 24


@pytest.fixture
def server() -> Iterator[ChatServer]:
    found = ChatServer()
    yield found
    found.shutdown()


@pytest.fixture
def settings(tmp_path: Path, server: ChatServer, ray_session: Path) -> list[str]:
    write_slates([make_slate(3 + i % 4, f"r{i}", query=f"query {i}") for i in range(NUM_SLATES)], tmp_path / "slates")
    return [
        f"input={tmp_path / 'slates'}",
        f"output={tmp_path / 'labelled'}",
        "backend=openai",
        "chat.model=m",
        f"endpoint.base_url={server.base_url}",
        "endpoint.api_key_env=SPD_TEST_KEY",
        "block_slates=8",
        f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}",
    ]


def run(settings: list[str]) -> dict[str, object]:
    return label.run(load_config(LabelConfig, None, settings))


def run_apart(settings: list[str]) -> subprocess.Popen[str]:
    """Start the job as a process with a Ray of its own, to be killed."""
    command = [sys.executable, "-m", "jobs.label", *(part for s in settings for part in ("--set", s))]
    environment = os.environ | QUIET_ENVIRONMENT | {"SPD_TEST_KEY": KEY}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_every_slate_is_asked_once_through_429_and_500(settings: list[str], server: ChatServer, tmp_path: Path) -> None:
    server.first_statuses = [429, 500]

    summary = run([*settings, "endpoint.usd_per_million_input_tokens=10"])

    assert set(server.asked.values()) == {3} and len(server.asked) == NUM_SLATES
    slates = list(read_slates(tmp_path / "labelled"))
    assert [slate.request_id for slate in slates] == [f"r{i}" for i in range(NUM_SLATES)]
    assert all(slate.teacher_ranking == tuple(reversed(range(len(slate.candidates)))) for slate in slates)
    assert summary == json.loads((tmp_path / "labelled.summary.json").read_text())
    cost = summary["cost"]
    assert isinstance(cost, dict)
    assert (summary["labelled"], summary["valid"], cost["num_requests"]) == (NUM_SLATES,) * 3
    assert (cost["input_tokens"], cost["output_tokens"]) == (100 * NUM_SLATES, 10 * NUM_SLATES)
    assert cost["usd"] == pytest.approx(100 * NUM_SLATES * 10 / 1e6)


def test_the_first_slates_alone_are_labelled(settings: list[str], server: ChatServer, tmp_path: Path) -> None:
    run([*settings, "max_slates=5"])

    found = list(read_slates(tmp_path / "labelled"))
    assert [slate.request_id for slate in found] == [f"r{i}" for i in range(5)]
    assert all(slate.teacher_ranking for slate in found)
    assert server.asked.total() == 5


def test_a_killed_job_pays_for_no_label_twice(settings: list[str], server: ChatServer, tmp_path: Path) -> None:
    server.delay_s = 0.4
    job = run_apart([*settings, "workers.num_workers=1", "endpoint.concurrency=1"])
    deadline = time.monotonic() + 200
    while len(server.asked) < 5:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    job.kill()  # SIGKILL
    job.wait()
    time.sleep(8)  # its Ray dies with it
    answered = {
        json.loads(line)["request_id"]
        for file in (tmp_path / "labelled.journal").glob("*/*.jsonl")
        for line in file.read_text().splitlines()
        if line
    }
    server.delay_s = 0.0

    output, _ = (again := run_apart(settings)).communicate(timeout=300)

    assert again.returncode == 0, output
    assert len(answered) >= 4
    assert all(server.asked[f"Query: query {name.removeprefix('r')}"] == 1 for name in answered)
    assert all(slate.teacher_ranking for slate in read_slates(tmp_path / "labelled"))


def test_a_wrong_key_stops_at_once(settings: list[str], server: ChatServer) -> None:
    with pytest.raises(ConfigError, match="answered 401 for model 'm': check the key in SPD_WRONG_KEY"):
        run([*settings, "endpoint.api_key_env=SPD_WRONG_KEY"])

    assert sum(server.asked.values()) <= 2 * 8  # the first block of each worker


def test_answers_are_repaired_counted_and_failures_tried_again(
    settings: list[str], server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.first_statuses = [400]
    first = run([*settings, "endpoint.max_retries=0"])
    assert first["failed"] == {"BadRequestError": NUM_SLATES}
    assert all(slate.teacher_ranking is None for slate in read_slates(tmp_path / "labelled"))

    server.text = "[2] > [2] > [9]"
    summary = run([*settings, "overwrite=true"])

    assert (summary["labelled"], summary["failed"]) == (NUM_SLATES, {})
    assert (summary["valid"], summary["repeated"], summary["out_of_range"]) == (0, NUM_SLATES, NUM_SLATES)
    rankings = [slate.teacher_ranking or () for slate in read_slates(tmp_path / "labelled")]
    assert all(ranking[:2] == (1, 0) for ranking in rankings)
    assert "query 1" not in "".join(capsys.readouterr())  # the endpoint echoes the prompt in its errors


def test_the_rate_limit_holds_for_all_workers_together(settings: list[str], server: ChatServer) -> None:
    run([*settings, "endpoint.requests_per_minute=240"])

    starts = sorted(server.starts)
    assert starts[-1] - starts[0] >= 0.8 * (NUM_SLATES - 2) / 4.0  # 4 a second, two workers that begin at once


def test_an_autoregressive_ranker_labels_with_several_permutations(
    settings: list[str], tiny_backbone: Path, tmp_path: Path
) -> None:
    build_tiny_teacher(tiny_backbone, tmp_path / "teacher")
    local = [*settings, "backend=local", f"local.artifact={tmp_path / 'teacher'}", "num_permutations=3"]

    summary = run(local)

    assert (summary["labelled"], summary["answers"], summary["valid"]) == (NUM_SLATES, 3 * NUM_SLATES, 3 * NUM_SLATES)
    slates = list(read_slates(tmp_path / "labelled"))
    cost = summary["cost"]
    assert isinstance(cost, dict) and cost["num_passes"] == 3 * sum(len(slate.candidates) for slate in slates)
    assert all(len(slate.extra_teacher_rankings) == 2 for slate in slates)
    with pytest.raises(ConfigError, match="answers given with another num_permutations"):
        run([*local, "num_permutations=2", "overwrite=true"])


def test_a_large_slate_is_labelled_by_sliding_windows(settings: list[str], server: ChatServer, tmp_path: Path) -> None:
    write_slates([make_slate(25, "large")], tmp_path / "large")
    windows = ["window_size=10", "window_stride=5", f"input={tmp_path / 'large'}", f"output={tmp_path / 'out'}"]

    run([*settings, *windows])

    (slate,) = read_slates(tmp_path / "out")
    assert slate.teacher_ranking is not None and sorted(slate.teacher_ranking) == list(range(25))
    assert slate.teacher_ranking[0] == 20  # the last window's reversal brings its 5 carried-over to the front
    assert sum(server.asked.values()) == 4  # windows at 15, 10, 5, 0


def test_a_killed_worker_pays_for_no_label_twice(settings: list[str], server: ChatServer, tmp_path: Path) -> None:
    server.delay_s = 0.2
    job = threading.Thread(target=run, args=([*settings, "workers.num_workers=1", "endpoint.concurrency=1"],))
    job.start()
    deadline = time.monotonic() + 120
    while len(server.asked) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (worker,) = [p for p in psutil.process_iter() if "MapWorker(MapBatches(ChatTeacher))" in " ".join(p.cmdline())]
    worker.kill()
    job.join(timeout=200)

    assert len(server.asked) == NUM_SLATES
    assert sum(server.asked.values()) <= NUM_SLATES + 1  # the one under way when it died
    assert all(slate.teacher_ranking for slate in read_slates(tmp_path / "labelled"))
