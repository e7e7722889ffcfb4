"""The five-minute ablation, from raw data to its page: a warm start and an autoregressive row among the rows."""

from pathlib import Path

import pytest

from jobs import ablate, prepare, results
from jobs.ablate_plan import AblateConfig
from jobs.files import read_json
from jobs.prepare import PrepareConfig
from jobs.results import ResultsConfig
from spd.config import load_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PLAN = str(Path(__file__).parents[2] / "jobs" / "ablation_small.toml")


def test_the_small_plan_runs_row_by_row_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking = f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}"
    prepare.run(load_config(PrepareConfig, None, [f"output={tmp_path / 'slates'}", tracking]))
    work = [f"train={tmp_path / 'slates/train'}", f"eval={tmp_path / 'slates/eval'}", f"work={tmp_path}", tracking]
    plan = load_config(AblateConfig, PLAN, [*work, f"results={tmp_path / 'results'}"])

    assert ablate.run(plan) == [row.name for row in plan.rows]
    assert ablate.run(plan) == []

    assert "3 have their result, 0 to run" in capsys.readouterr().out
    for row in plan.rows:
        result = read_json(tmp_path / "results" / f"{row.name}.json")
        curves, metrics = result["curves"], result["metrics"]
        assert isinstance(curves, dict) and isinstance(metrics, dict)
        assert [step for step, _ in curves["loss"]] == list(range(8))
        assert len(curves["held_out_auc"]) == 2
        assert metrics["student"]["auc"]["n"] == 20
    page = results.run(ResultsConfig(plans=(PLAN,), benchmarks=(), output=str(tmp_path / "page.md"))).read_text()
    assert "autoregressive" in page
