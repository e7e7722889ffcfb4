"""The artifact: it comes back as it went, holds no pickle, and refuses whatever does not match."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from spd.artifact import load_spec, load_trained_state, model_version
from spd.backbone import AdapterConfig, add_adapter, file_sha256, load_backbone
from spd.errors import ArtifactError, DataError
from spd.ranker import Ranker
from tests.conftest import build_tiny_artifact, build_tiny_backbone, make_slate


@pytest.fixture
def copy(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the tiny artifact to spoil."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))


def rewrite(folder: Path, name: str, change: Callable[[dict[str, object]], None]) -> None:
    """Change a JSON file as a person would, and mend its sum in the manifest."""
    values = json.loads((folder / name).read_text())
    change(values)
    (folder / name).write_text(json.dumps(values))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[name] = file_sha256(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_the_folder_holds_what_it_promises_and_no_pickle(tiny_artifact: Path) -> None:
    names = {path.name for path in tiny_artifact.iterdir()}

    assert {"ranker.json", "head.safetensors", "adapter_model.safetensors", "manifest.json"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pth", ".pkl")) for name in names)


def test_loading_twice_ranks_alike(tiny_artifact: Path, tiny_ranker: Ranker) -> None:
    again = Ranker.from_pretrained(tiny_artifact, device=torch.device("cpu"))
    slate = make_slate(9)

    assert again.rank_slates([slate]) == tiny_ranker.rank_slates([slate])
    assert again.version == model_version(tiny_artifact)


def test_rank_gives_the_prefix_of_the_full_ranking(tiny_ranker: Ranker) -> None:
    documents = [f"movie {i}" for i in range(9)]

    full, top = tiny_ranker.rank("space", documents), tiny_ranker.rank("space", documents, top_n=3)

    assert top == full[:3]
    assert sorted(place.index for place in full) == list(range(9))
    assert [place.document for place in full] == [documents[place.index] for place in full]


def test_rank_refuses_no_documents_and_one_pass_too_many(tiny_ranker: Ranker) -> None:
    with pytest.raises(DataError, match="has no candidate"):
        tiny_ranker.rank("q", [])
    with pytest.raises(DataError, match="33 candidates exceed 32"):
        tiny_ranker.encode_one(make_slate(33))
    with pytest.raises(DataError, match="top_n=0 must be at least 1"):
        tiny_ranker.rank("q", ["x"], top_n=0)


@pytest.mark.parametrize("name", ["head.safetensors", "adapter_model.safetensors", "tokenizer.json", "ranker.json"])
def test_a_corrupt_or_missing_file_is_named(copy: Path, name: str) -> None:
    with (copy / name).open("r+b") as file:
        file.seek(20)
        file.write(b"\x00\x01")
    with pytest.raises(ArtifactError, match=f"{name} has sha256 .* corrupt or was edited"):
        load_spec(copy)

    (copy / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name} is missing"):
        load_spec(copy)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_positions", 16, "head.safetensors does not fit ranker.json"),
        ("head", "linear", "head.safetensors does not fit ranker.json"),
        ("head", "quadratic", "head='quadratic' must be one of"),
        ("format_version", 99, "format_version=99, this release reads 2"),
        ("backbone_sha256", "0" * 64, "the artifact was trained on 000000000000"),
        ("tau", 0.0, "tau=0.0 must be a finite number"),
        ("max_trained_candidates", 0, "max_trained_candidates=0 must be at least 1"),
        ("instruction", "x", "instruction is no known key"),
    ],
)
def test_a_spec_that_does_not_match_says_which(copy: Path, key: str, value: object, message: str) -> None:
    rewrite(copy, "ranker.json", lambda spec: spec.update({key: value}))

    with pytest.raises(ArtifactError, match=message):
        Ranker.from_pretrained(copy)


def test_another_backbone_is_refused(copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    build_tiny_backbone(other)
    (other / "config.json").write_text((other / "config.json").read_text().replace("8192", "4096"))

    with pytest.raises(ArtifactError, match="point it at that backbone, or train again"):
        Ranker.from_pretrained(copy, backbone_source=str(other))


def test_a_file_that_the_manifest_does_not_list_is_refused(copy: Path) -> None:
    (copy / "planted.json").write_text("{}")

    with pytest.raises(ArtifactError, match=r"planted\.json is not in manifest\.json"):
        load_spec(copy)


def test_a_planted_folder_is_refused(copy: Path) -> None:
    (copy / "additional_chat_templates").mkdir()

    with pytest.raises(ArtifactError, match=r"additional_chat_templates is not in manifest"):
        load_spec(copy)


def test_an_adapter_that_fits_only_in_part_is_refused(copy: Path) -> None:
    rewrite(copy, "adapter_config.json", lambda config: config.update(target_modules=["q_proj"]))

    with pytest.raises(ArtifactError, match=r"adapter_model\.safetensors does not fit the backbone"):
        Ranker.from_pretrained(copy)


def adapted_layers(backbone_folder: Path, num_layers: int, seed: int) -> PeftModel:
    """The tiny backbone's bottom layers under a random adapter that changes something."""
    torch.manual_seed(seed)
    adapted = add_adapter(load_backbone(backbone_folder, num_layers, torch.float32), AdapterConfig(rank=4, alpha=8))
    assert isinstance(adapted, PeftModel)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return adapted


def test_a_warm_start_from_fewer_layers_takes_the_bottom_ones(tiny_backbone: Path, tmp_path: Path) -> None:
    trained = get_peft_model_state_dict(adapted_layers(tiny_backbone, 1, seed=1), save_embedding_layers=False)
    save_file(trained, tmp_path / "adapter_model.safetensors")
    model = adapted_layers(tiny_backbone, 2, seed=2)
    before = get_peft_model_state_dict(model, save_embedding_layers=False)
    fresh = {name: tensor.clone() for name, tensor in before.items() if name not in trained}

    load_trained_state(tmp_path, model, None)
    after = get_peft_model_state_dict(model, save_embedding_layers=False)

    assert trained and fresh
    assert after.keys() == trained.keys() | fresh.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in (fresh | trained).items())


def test_a_warm_start_from_more_layers_is_refused(tiny_backbone: Path, tmp_path: Path) -> None:
    trained = get_peft_model_state_dict(adapted_layers(tiny_backbone, 2, seed=1), save_embedding_layers=False)
    save_file(trained, tmp_path / "adapter_model.safetensors")

    with pytest.raises(ArtifactError, match=r"does not fit: set the same adapter\.rank, and backbone\.num_layers not"):
        load_trained_state(tmp_path, adapted_layers(tiny_backbone, 1, seed=2), None)


def test_loading_asks_no_hub_even_for_a_base_model_that_looks_like_a_hub_id(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refuse(*address: object, **options: object) -> None:
        asked.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    rewrite(copy, "adapter_config.json", lambda config: config.update(base_model_name_or_path="Qwen/Qwen3-0.6B"))

    assert Ranker.from_pretrained(copy).rank("q", ["a", "b"])
    assert asked == []


def test_not_an_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is no folder"):
        load_spec(tmp_path / "absent")
    with pytest.raises(ArtifactError, match=r"manifest\.json is missing"):
        load_spec(tmp_path)


def test_an_existing_folder_is_never_overwritten(tiny_backbone: Path, copy: Path) -> None:
    with pytest.raises(ArtifactError, match="exists: choose another"):
        build_tiny_artifact(tiny_backbone, copy)
