"""The benchmark of one pass against decoding: what it counts, and its table on the page of results."""

from pathlib import Path

import pytest

from jobs import benchmark, results
from jobs.benchmark import BenchmarkConfig
from jobs.results import ResultsConfig
from spd.config import load_config
from spd.datasets.files import write_slates
from tests.conftest import make_slate


def test_passes_validity_and_ratios_are_counted_and_shown(tiny_backbone: Path, tmp_path: Path) -> None:
    write_slates([make_slate(4, f"r{i}") for i in range(3)], tmp_path / "slates")
    file = tmp_path / "benchmark.json"
    settings = [f'slates=["{tmp_path / "slates"}"]', "repeats=1", f"json={file}", f"backbone.source={tiny_backbone}"]

    report = benchmark.run(load_config(BenchmarkConfig, None, settings))
    results.run(ResultsConfig(plans=(), benchmarks=(str(file),), output=str(tmp_path / "page.md")))

    sizes, ratios = report["sizes"], report["ratios"]
    assert isinstance(sizes, dict) and isinstance(ratios, dict)
    found = sizes["n4"]
    assert found["passes"]["spd"] == 1 and found["passes"]["ar_token"] == 4 < found["passes"]["ar"]
    assert found["valid_share"]["ar"] == found["valid_share"]["ar_token"] == 1
    milliseconds = found["milliseconds"]
    assert ratios["ar_over_spd_n4"] == pytest.approx(milliseconds["ar"] / milliseconds["spd"], abs=0.01)
    page = (tmp_path / "page.md").read_text()
    assert f"| ar_token | {milliseconds['ar_token']:.3f} (4, 100%) |" in page
