"""`make demo`, and the numbers that it must reach (issue 2). Takes about a quarter of an hour."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.conftest import free_port

pytestmark = pytest.mark.demo

ROOT = Path(__file__).parents[2]


def test_the_demo_trains_scores_and_serves_a_ranker_that_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "jobs.demo", "--set", f"folder={folder}", "--set", f"port={free_port()}"]

    subprocess.run(command, cwd=ROOT, check=True)

    report = json.loads((folder / "report.json").read_text())
    print(json.dumps({key: report[key] for key in ("metrics", "wall_s", "peak_memory_gib")}))
    student = report["metrics"]["student"]
    assert student["auc"]["n"] >= 300
    assert student["auc"]["value"] >= 0.66
    for other in ("untrained", "input_order"):
        for metric in ("auc", "ndcg@10"):
            assert student[metric]["low"] > report["metrics"][other][metric]["high"]
    assert report["num_valid_permutations"] == report["num_scored"] == 320
    assert report["peak_memory_gib"] < 10
    indices = [result["index"] for result in report["endpoint"]["answer"]["results"]]
    assert sorted(indices) == list(range(20))
