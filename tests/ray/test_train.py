"""Training on two real workers: it learns, survives a killed driver, and is the same however the batch is split."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from jobs import train
from jobs.cli import QUIET_ENVIRONMENT
from jobs.train_config import TrainConfig
from spd.autoregressive import ArRanker
from spd.config import load_config
from spd.datasets.files import write_slates
from spd.errors import ArtifactError, ConfigError
from spd.ranker import Ranker
from spd.slate import Slate
from tests.conftest import make_slate

pytestmark = pytest.mark.ray

NUM_SLATES = 43  # divides by neither workers nor batch: the last batch of an epoch is short
START_TIMEOUT_S = 400


def teacher_slate(number: int) -> Slate:
    """Return a slate of 4 to 7 candidates whose teacher prefers short texts."""
    slate = make_slate(4 + number % 4, f"r{number}", query=f"query {number % 5}")
    lengths = [len(candidate.text) for candidate in slate.candidates]
    order = tuple(sorted(range(len(lengths)), key=lambda i: (lengths[i], i)))
    return replace(slate, teacher_ranking=order)


@pytest.fixture(scope="module")
def slates_uri(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "slates"
    write_slates([teacher_slate(number) for number in range(NUM_SLATES)], folder, rows_per_file=20)
    return folder


def settings(slates: Path, backbone: Path, work: Path, name: str, *extra: str) -> list[str]:
    return [
        f"name={name}",
        f"train={slates}",
        f"output={work / name}",
        f"storage={work / 'runs'}",
        f"backbone.source={backbone}",
        f"tracking.uri=sqlite:///{work / 'mlflow.db'}",
        "adapter.rank=4",
        "head.num_positions=8",
        "num_epochs=2",
        "global_batch_slates=8",
        "micro_batch_slates=2",
        "optimizer.warmup_steps=2",
        "checkpoint.every_steps=4",
        *extra,
    ]


def run(arguments: list[str]) -> Path:
    return train.run(load_config(TrainConfig, None, arguments))


def curve(work: Path, name: str, metric: str = "loss") -> dict[int, float]:
    """Return the metric by step of the one MLflow run of that name."""
    client = MlflowClient(f"sqlite:///{work / 'mlflow.db'}", f"sqlite:///{work / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("spd")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], f"tags.`spd.run` = '{name}'")
    assert len(runs) == 1 and runs[0].info.status == "FINISHED"
    return {point.step: point.value for point in client.get_metric_history(runs[0].info.run_id, metric)}


def count_points(work: Path, name: str, step: int) -> int:
    """Return how often the run of that name logged its loss at `step`."""
    client = MlflowClient(f"sqlite:///{work / 'mlflow.db'}", f"sqlite:///{work / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("spd")
    assert experiment is not None
    run_id = client.search_runs([experiment.experiment_id], f"tags.`spd.run` = '{name}'")[0].info.run_id
    return sum(point.step == step for point in client.get_metric_history(run_id, "loss"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def whole_curve(ray_session: Path, slates_uri: Path, tiny_backbone: Path, work: Path) -> dict[int, float]:
    """The loss curve of a bf16 run that nothing disturbed."""
    run(settings(slates_uri, tiny_backbone, work, "whole", "backbone.precision=bf16"))
    return curve(work, "whole")


def test_two_workers_learn_and_leave_a_registered_artifact(whole_curve: dict[int, float], work: Path) -> None:
    losses = [whole_curve[step] for step in sorted(whole_curve)]

    assert sorted(whole_curve) == list(range(12))  # 2 epochs of ceil(43 / 8)
    assert sum(losses[-3:]) < sum(losses[:3])
    head = load_file(work / "whole" / "head.safetensors")
    adapter = load_file(work / "whole" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in (*head.values(), *adapter.values())} == {torch.float32}  # the masters
    assert any(not torch.equal(t, t.bfloat16().float()) for t in adapter.values())  # and not bf16 blown up
    assert all(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    client = MlflowClient(f"sqlite:///{work / 'mlflow.db'}", f"sqlite:///{work / 'mlflow.db'}")
    assert str(client.get_model_version_by_alias("spd", "challenger").version) == "1"


def test_the_registered_version_is_the_artifact(
    whole_curve: dict[int, float], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobs.tracking import TrackingConfig, fetch_artifact
    from spd.artifact import model_version

    monkeypatch.setenv("SPD_CACHE", str(work / "cache"))

    fetched = fetch_artifact(TrackingConfig(uri=f"sqlite:///{work / 'mlflow.db'}"), "models:/spd/1")

    assert model_version(fetched) == model_version(work / "whole")
    assert Ranker.from_pretrained(fetched).rank("q", ["a", "b"])


def test_a_killed_driver_goes_on_from_its_checkpoint(
    whole_curve: dict[int, float], slates_uri: Path, tiny_backbone: Path, work: Path
) -> None:
    arguments = settings(slates_uri, tiny_backbone, work, "killed", "backbone.precision=bf16")
    kill_after_first_checkpoint(arguments, work / "runs" / "killed")

    run(arguments)
    resumed = curve(work, "killed")
    assert count_points(work, "killed", step=0) == 1  # it went on; from the start there would be a second

    assert sorted(resumed) == sorted(whole_curve)
    assert [resumed[step] for step in sorted(resumed)] == pytest.approx(
        [whole_curve[step] for step in sorted(whole_curve)], abs=1e-3
    )


def kill_after_first_checkpoint(arguments: list[str], run_folder: Path) -> None:
    """Start the job as a process of its own (with a Ray of its own) and SIGKILL its driver once it has a checkpoint."""
    command = [sys.executable, "-m", "jobs.train", *(part for a in arguments for part in ("--set", a))]
    environment = os.environ | QUIET_ENVIRONMENT
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    snapshot = run_folder / "checkpoint_manager_snapshot.json"
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while not (snapshot.exists() and '"checkpoint_' in snapshot.read_text()):
            assert process.poll() is None, "the job ended before it was killed"
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.05)
    finally:
        process.kill()  # SIGKILL
        process.wait()
    assert process.returncode == -signal.SIGKILL


def test_other_settings_under_the_same_name_are_refused(
    whole_curve: dict[int, float], slates_uri: Path, tiny_backbone: Path, work: Path
) -> None:
    arguments = settings(slates_uri, tiny_backbone, work, "whole", f"output={work / 'other'}", "seed=5")

    with pytest.raises(ConfigError, match="name='whole' is a run with another seed"):
        run(arguments)


def test_other_data_under_the_same_name_is_refused(
    whole_curve: dict[int, float], tiny_backbone: Path, work: Path, tmp_path: Path
) -> None:
    write_slates([teacher_slate(number) for number in range(NUM_SLATES + 1)], tmp_path / "more")
    arguments = settings(tmp_path / "more", tiny_backbone, work, "whole", f"output={work / 'other'}")

    with pytest.raises(ConfigError, match="name='whole' is a run with another"):
        run([*arguments, "backbone.precision=bf16"])


def test_one_worker_and_two_accumulated_or_not_learn_the_same(
    ray_session: Path, slates_uri: Path, tiny_backbone: Path, work: Path
) -> None:
    splits = {
        "two_x2": ["workers.num_workers=2", "micro_batch_slates=2"],
        "one_x1": ["workers.num_workers=1", "micro_batch_slates=8"],
    }
    for name, split in splits.items():
        run(settings(slates_uri, tiny_backbone, work, name, "num_epochs=1", "backbone.precision=fp32", *split))

    two, one = curve(work, "two_x2"), curve(work, "one_x1")

    assert sorted(two) == list(range(6))
    assert [two[step] for step in sorted(two)] == pytest.approx([one[step] for step in sorted(one)], abs=2e-4)


def test_a_frozen_backbone_read_once_learns_what_one_read_each_epoch_does(
    ray_session: Path, slates_uri: Path, tiny_backbone: Path, work: Path
) -> None:
    frozen = ["adapter.rank=0", "num_epochs=2", "backbone.precision=fp32", "max_slates=19"]
    run(settings(slates_uri, tiny_backbone, work, "cached", *frozen))
    run(settings(slates_uri, tiny_backbone, work, "uncached", *frozen, "cache_hidden=false"))

    cached, uncached = curve(work, "cached"), curve(work, "uncached")

    assert [cached[step] for step in range(3)] == pytest.approx([uncached[step] for step in range(3)], abs=1e-4)
    assert sorted(cached) == list(range(6))  # 2 epochs of ceil(19 / 8)


def test_an_autoregressive_ranker_learns_and_is_evaluated_while_it_trains(
    ray_session: Path, slates_uri: Path, tiny_backbone: Path, work: Path
) -> None:
    objective = ["objective=ar", "prompt.identifiers=markers", "optimizer.adapter_lr=5e-3"]
    held_out = [f"held_out.slates={slates_uri}", "held_out.max_slates=9", "held_out.every_steps=6"]
    artifact = run(settings(slates_uri, tiny_backbone, work, "ar", *objective, *held_out))

    losses, taus = curve(work, "ar"), curve(work, "ar", "held_out_kendall_tau")

    assert losses[11] < losses[0]
    assert sorted(taus) == [5, 11] and all(-1 <= tau <= 1 for tau in taus.values())
    ranker = ArRanker.from_pretrained(artifact, device=torch.device("cpu"))
    assert not (artifact / "head.safetensors").exists()
    assert sorted(ranker.rank_slates([teacher_slate(3)])[0].answer.order) == list(range(7))
    with pytest.raises(ArtifactError, match="is an autoregressive ranker"):
        Ranker.from_pretrained(artifact)


def test_a_warm_start_begins_where_the_other_run_ended(
    whole_curve: dict[int, float], slates_uri: Path, tiny_backbone: Path, work: Path
) -> None:
    warm = ["max_steps=1", f"init_from={work / 'whole'}", "backbone.precision=bf16"]
    run(settings(slates_uri, tiny_backbone, work, "warm", *warm))

    assert curve(work, "warm")[0] < whole_curve[0] - 0.5 * (whole_curve[0] - whole_curve[11])

    with pytest.raises(ConfigError, match=r"has head\.num_positions=8, this run 9: set the same"):
        run(settings(slates_uri, tiny_backbone, work, "unlike", *warm, "head.num_positions=9"))
