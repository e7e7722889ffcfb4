"""From raw data to a served ranking on a laptop: prepare, train, evaluate, score, serve, one request.

    python -m jobs.demo
    python -m jobs.demo --set folder=/tmp/demo

Each stage is a job of its own, and its command is printed. Cut off, the demo goes on at the stage that was not
finished; a finished one starts anew. The last line names `report.json`.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import httpx
from ray import serve

from jobs import evaluate, prepare, score, train
from jobs.cli import run_job
from jobs.cluster import WorkerConfig, start_ray
from jobs.evaluate import EvaluateConfig
from jobs.files import read_json, write_json
from jobs.memory import MemoryWatch
from jobs.prepare import PrepareConfig
from jobs.score import ScoreConfig
from jobs.train_config import TrainConfig
from serve_app.app import build_app
from spd.config import config_to_dict, load_config
from spd.datasets.files import read_slates
from spd.errors import ConfigError
from spd.slate import Slate

REPORT_FILE = "report.json"
EVALUATION_FILE = "evaluation.json"
MARKER_FILE = ".spd-demo"
REQUEST_TIMEOUT_S = 60
Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """Where the demo writes, and where its endpoint listens."""

    folder: str = "demo"
    """Folder for slates, artifact, rankings and report."""
    train_config: str = "jobs/demo_train.toml"
    """Settings of the training run."""
    slates_per_user: int = 1
    """Training slates of each MovieLens user."""
    num_eval_users: int = 320
    """Held-out MovieLens users, one slate each."""
    port: int = 8000
    """HTTP port of the endpoint."""


def main() -> int:
    """Run the demo; returns the exit code."""
    return run_job(__doc__ or "", DemoConfig, run, describe)


def run(config: DemoConfig) -> dict[str, object]:
    """Run all stages; returns (and stores) the report."""
    folder = Path(config.folder)
    _start_folder(folder)
    start_s = time.monotonic()
    with MemoryWatch() as memory:
        for stage in stages(config):
            stage.run()
        endpoint = _ask_endpoint(config, folder)
    evaluation = read_json(folder / EVALUATION_FILE)
    scored = read_json(folder / "scored" / score.SUMMARY_FILE)
    report = {
        "metrics": evaluation["metrics"],
        "student_minus": evaluation["student_minus"],
        "teacher_recovered": evaluation["teacher_recovered"],
        "num_scored": scored["num_scored"],
        "num_valid_permutations": scored["num_valid_permutations"],
        "wall_s": round(time.monotonic() - start_s, 1),
        "peak_memory_gib": round(memory.peak_bytes / 2**30, 2),
        "endpoint": endpoint,
    }
    write_json(folder / REPORT_FILE, report)
    _print_report(report, folder / REPORT_FILE)
    return report


def describe(config: DemoConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: the settings of every stage."""
    return {"demo": config_to_dict(config)} | {stage.name: stage.command for stage in stages(config)}


@dataclass(frozen=True, slots=True)
class Stage(Generic[Config]):
    """One job with its settings, and the file or folder that shows it done."""

    name: str
    config_type: type[Config]
    job: Callable[[Config], object]
    done: Path
    config_file: str | None
    settings: tuple[str, ...]

    @property
    def command(self) -> str:
        """What a person would type to run this stage alone."""
        file = f" --config {self.config_file}" if self.config_file else ""
        return f"python -m jobs.{self.name}{file}" + "".join(f" --set {setting}" for setting in self.settings)

    def run(self) -> None:
        """Run the job, unless it is done already."""
        print(f"\n== {self.command}")
        if self.done.exists():
            print(f"== {self.name}: done already ({self.done})")
            return
        start_s = time.monotonic()
        self.job(load_config(self.config_type, self.config_file, self.settings))
        print(f"== {self.name} took {time.monotonic() - start_s:.0f} s")


def stages(
    config: DemoConfig,
) -> tuple[Stage[PrepareConfig], Stage[TrainConfig], Stage[EvaluateConfig], Stage[ScoreConfig]]:
    """Return the jobs of the demo, in order."""
    folder = Path(config.folder)
    slates, artifact, scored = folder / "slates", folder / "artifact", folder / "scored"
    evaluation = folder / EVALUATION_FILE
    counts = (
        f"movielens.slates_per_user={config.slates_per_user}",
        f"movielens.num_eval_users={config.num_eval_users}",
    )
    return (
        Stage(
            "prepare",
            PrepareConfig,
            prepare.run,
            slates / prepare.SUMMARY_FILE,
            None,
            (f"output={slates}", "overwrite=true", *counts),
        ),
        Stage(
            "train",
            TrainConfig,
            train.run,
            artifact,
            config.train_config,
            (f"train={slates}/train", f"output={artifact}", f"storage={folder}/runs"),
        ),
        Stage(
            "evaluate",
            EvaluateConfig,
            evaluate.run,
            evaluation,
            None,
            (f"slates={slates}/eval", f"artifact={artifact}", f"output={evaluation}"),
        ),
        Stage(
            "score",
            ScoreConfig,
            score.run,
            scored / score.SUMMARY_FILE,
            None,
            (f"input={slates}/eval", f"output={scored}", f"artifact={artifact}"),
        ),
    )


def _start_folder(folder: Path) -> None:
    """Mark the folder as the demo's; a finished demo in it is removed, its own parts by name and nothing else.

    Raises ConfigError for a folder that holds something and was made by no demo.
    """
    marker = folder / MARKER_FILE
    if folder.exists() and not marker.is_file() and any(folder.iterdir()):
        raise ConfigError(f"folder={str(folder)!r} holds files of yours: name an empty or absent folder")
    if (folder / REPORT_FILE).is_file():
        for name in ("slates", "artifact", "runs", "scored"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (EVALUATION_FILE, REPORT_FILE):
            (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _ask_endpoint(config: DemoConfig, folder: Path) -> dict[str, object]:
    """Serve the artifact, rank one held-out slate over HTTP; returns the request and its answer."""
    print(f"\n== serve run serve_app.app:build_app artifact={folder / 'artifact'}")
    start_ray(WorkerConfig())
    serve.start(http_options={"host": "127.0.0.1", "port": config.port})
    serve.run(build_app({"artifact": str(folder / "artifact")}), name="spd")
    slate = next(read_slates(str(folder / "slates" / "eval")))
    body = {"query": slate.query, "documents": [candidate.text for candidate in slate.candidates]}
    url = f"http://127.0.0.1:{config.port}/v1/rerank"
    try:
        answer = httpx.post(url, json=body, timeout=REQUEST_TIMEOUT_S).raise_for_status().json()
    finally:
        serve.shutdown()
    _print_ranking(slate, answer)
    return {"url": url, "request": body, "answer": answer}


def _print_ranking(slate: Slate, answer: Mapping[str, object]) -> None:
    results = answer["results"]
    assert isinstance(results, list)
    relevance = slate.relevance or (None,) * len(slate.candidates)
    print(f"\n{slate.query}\n")
    for place, result in enumerate(results, start=1):
        mark = "   <- liked next" if relevance[result["index"]] else ""
        print(f"{place:3d}. {result['relevance_score']:.3f}  {slate.candidates[result['index']].text}{mark}")


def _print_report(report: Mapping[str, object], path: Path) -> None:
    recovered = report["teacher_recovered"]
    assert isinstance(recovered, Mapping)
    print(
        f"\nOf the teacher's lead over the untrained ranker the student recovers {recovered['auc']:.0%} in AUC and "
        f"{recovered['ndcg@10']:.0%} in NDCG@10."
        f"\n{report['num_valid_permutations']} of {report['num_scored']} scored rows counted to be permutations."
        f"\n{report['wall_s']} s, at most {report['peak_memory_gib']} GiB in all processes. Report: {path}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
