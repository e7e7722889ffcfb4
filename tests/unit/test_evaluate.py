"""The evaluation job: windows, autoregressive artifacts, upstream scores, order sensitivity, its report."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jobs import evaluate
from jobs.cli import run_job
from jobs.evaluate_rows import ArRun, RankerOptions, baseline_orders, upstream_order, validity_of
from jobs.order_sensitivity import exposure_of, mean_tau, order_sensitivity, sensitivity_line
from spd.answer import Answer
from spd.artifact import RankerSpec, save_artifact
from spd.autoregressive import ArRanker
from spd.backbone import BackboneConfig, backbone_sha256, load_tokenizer
from spd.datasets.files import write_slates
from spd.prompt import PromptConfig
from spd.slate import Slate
from spd.windows import WindowConfig
from tests.conftest import make_slate

MAX_CANDIDATES = 8


@pytest.fixture(scope="module")
def ar_artifact(tiny_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoregressive artifact of the tiny backbone as it came, up to 8 candidates."""
    folder = tmp_path_factory.mktemp("artifacts") / "ar"
    spec = RankerSpec(
        objective="ar",
        backbone=BackboneConfig(source=str(tiny_backbone), precision="fp32"),
        backbone_sha256=backbone_sha256(tiny_backbone),
        prompt=PromptConfig(identifiers="markers"),
        num_positions=MAX_CANDIDATES,
        max_trained_candidates=MAX_CANDIDATES,
        has_adapter=False,
    )
    save_artifact(folder, spec, load_tokenizer(tiny_backbone), {}, None)
    return folder


def labelled(size: int, number: int) -> Slate:
    """Return a slate of one of two queries, its last candidate relevant, its first the upstream's best."""
    relevance = (0.0,) * (size - 1) + (1.0,)
    scores = tuple(float(size - place) for place in range(size))
    return replace(make_slate(size, f"r{number}", f"query {number % 2}"), relevance=relevance, score=scores)


def run(artifact: Path, slates: list[Slate], folder: Path, *settings: str) -> dict[str, dict[str, dict[str, object]]]:
    """Run the whole job; returns the report that it stored."""
    write_slates(slates, folder / "slates")
    own = [f"slates={folder / 'slates'}", f"artifact={artifact}", f"output={folder / 'report.json'}"]
    everything = [*own, f"tracking.uri=sqlite:///{folder / 'mlflow.db'}", *settings]
    arguments = [part for setting in everything for part in ("--set", setting)]
    assert run_job("", evaluate.EvaluateConfig, evaluate.run, evaluate.describe, arguments) == 0
    report: dict[str, dict[str, dict[str, object]]] = json.loads((folder / "report.json").read_text())
    return report


def test_large_slates_are_evaluated_in_windows(
    tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slates = [labelled(size, number) for number, size in enumerate((70, 9, 33))]

    report = run(tiny_artifact, slates, tmp_path, "bootstrap_by=query", "num_shuffles=2")

    assert set(report["metrics"]) == {"student", "untrained", "upstream_score", "input_order", "random"}
    assert report["passes"]["student"] == {"mean": (6 + 1 + 4) / 3, "max": 6, "mean_sequential": 1}
    assert report["metrics"]["upstream_score"]["auc"] == {"value": 0.0, "low": 0.0, "high": 0.0, "n": 3}
    assert set(report["student_minus"]) == {"untrained", "upstream_score", "input_order"}
    assert report["bootstrap_by"] == "query" and len(report["order_sensitivity"]["exposure"]) == 70
    printed = capsys.readouterr().out
    assert "student: 3.7 forward passes a slate on average (at most 6), 1.0 of them one after the other" in printed
    assert "under 2 shuffles of each slate Kendall tau is" in printed


def test_slates_of_one_pass_have_a_row_a_decoder(tiny_artifact: Path, tmp_path: Path) -> None:
    report = run(tiny_artifact, [labelled(9, number) for number in range(3)], tmp_path, "compare_untrained=false")

    decoders = {"student", "student (greedy)", "student (expected)"}
    assert set(report["metrics"]) == {*decoders, "upstream_score", "input_order", "random"}
    assert report["passes"] == {"student": {"mean": 1, "max": 1, "mean_sequential": 1}}


def test_an_autoregressive_artifact_is_evaluated(
    ar_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slates = [labelled(size, number) for number, size in enumerate((8, 5, 14))]

    report = run(ar_artifact, slates, tmp_path, "num_shuffles=2")

    # 14 candidates by windows of 8 and strides of 4: [6, 14), [2, 10), [0, 8), 8 tokens each
    assert report["passes"]["student"] == {"mean": (8 + 5 + 24) / 3, "max": 24, "mean_sequential": (8 + 5 + 24) / 3}
    assert report["metrics"]["untrained"] == report["metrics"]["student"]  # the artifact adds nothing to the backbone
    assert "student (free)" in report["metrics"]
    free = report["free_decoding"]
    assert free["num_answers"] == 5 and free["mean_passes"] == report["passes"]["student (free)"]["mean"]
    assert f"of 5 free answers {free['valid_share']:.1%} were permutations" in capsys.readouterr().out


def test_an_autoregressive_run_is_each_windows_answer(ar_artifact: Path) -> None:
    ranker = ArRanker.from_pretrained(ar_artifact)
    run = ArRun(ranker, RankerOptions(windows=WindowConfig(), batch_tokens=4096), "constrained")
    slate = make_slate(8)

    found = run.rank([slate], "test")

    assert found.orders == [ranker.rank_slates([slate])[0].answer.order]
    assert found.num_passes == [8] and len(found.answers) == 1


def test_validity_by_hand() -> None:
    bad = Answer(order=(0, 1, 2), num_repeated=1, num_missing=2, num_out_of_range=1)

    found = validity_of([Answer(order=(0, 1, 2)), bad], [3, 4])

    assert found["valid_share"] == 0.5 and found["mean_passes"] == 3.5 and found["num_answers"] == 2
    assert (found["mean_repeated"], found["mean_missing"], found["mean_out_of_range"]) == (0.5, 1.0, 0.5)


def test_upstream_order_puts_unknown_last_and_keeps_ties() -> None:
    slate = replace(make_slate(5), score=(1.0, None, 2.0, 1.0, -3.0))

    assert upstream_order(slate) == [2, 0, 3, 4, 1]
    assert "upstream_score" in baseline_orders([slate], 0)
    assert "upstream_score" not in baseline_orders([slate, make_slate(5, "r2")], 0)


def test_an_order_blind_ranker_is_insensitive() -> None:
    def by_id(slates: list[Slate]) -> list[list[int]]:
        return [sorted(range(len(slate.candidates)), key=lambda i: slate.candidates[i].id) for slate in slates]

    found = order_sensitivity(by_id, [make_slate(6, f"r{k}") for k in range(400)], 3, seed=0)

    assert found["kendall_tau"] == {"value": 1.0, "low": 1.0, "high": 1.0, "n": 400}
    assert found["exposure"] == pytest.approx([1.0] * 6, abs=0.06)
    assert sensitivity_line(found).startswith("evaluate: under 3 shuffles of each slate Kendall tau is 1.000 [1.000,")


def test_a_ranker_that_keeps_the_input_order_shows_in_exposure() -> None:
    def keep(slates: list[Slate]) -> list[range]:
        return [range(len(slate.candidates)) for slate in slates]

    found = order_sensitivity(keep, [make_slate(2, f"r{k}") for k in range(40)], 4, seed=0)

    # gains 1 and 0.63093, mean 0.81546
    assert found["exposure"] == pytest.approx([1.22630, 0.77370], abs=1e-5)
    tau = found["kendall_tau"]
    assert isinstance(tau, dict) and abs(tau["value"]) < 0.3


def test_exposure_and_tau_by_hand() -> None:
    assert exposure_of([2, 0, 1]) == pytest.approx(np.array([0.63093, 0.5, 1.0]) / 0.71031, abs=1e-4)
    assert mean_tau([[0, 1], [0, 1], [1, 0]]) == pytest.approx((1 - 1 - 1) / 3)
    assert mean_tau([[0], [0]]) is None


def test_one_shuffle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--set", "slates=x", "--set", "artifact=y", "--set", "num_shuffles=1", "--set", "windows.stride=0"]

    assert run_job("", evaluate.EvaluateConfig, evaluate.run, evaluate.describe, arguments) == 2
    error = capsys.readouterr().err
    assert "num_shuffles=1 makes no pair" in error and "windows.stride=0 must be at least 1" in error
