"""Backbone sources, their errors, early exit, and buffers that keep their precision."""

from pathlib import Path

import pytest
import torch

from spd.backbone import (
    AdapterConfig,
    add_adapter,
    backbone_sha256,
    cast_parameters,
    load_backbone,
    resolve_backbone,
    resolve_dtype,
)
from spd.errors import ArtifactError, ConfigError


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "does not exist: name a folder, a GGUF file or a hub id"),
        ("missing.gguf", "does not exist"),
        ("package:no_such_package/x", "package 'no_such_package' is not installed: run `make assets`"),
        ("package:spd/absent.gguf", "has no 'absent.gguf'"),
        ("not a hub id", "neither a local folder or file nor a hub id"),
    ],
)
def test_a_wrong_source_is_an_error(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(ArtifactError, match=message):
        resolve_backbone(source)


def test_a_file_that_is_no_gguf_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPD_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")

    with pytest.raises(ArtifactError, match="no readable GGUF"):
        resolve_backbone(str(broken))
    assert list((tmp_path / "cache" / "backbones").iterdir()) == []


def test_the_backbone_has_no_lm_head_and_is_frozen(tiny_backbone: Path) -> None:
    backbone = load_backbone(tiny_backbone, None, torch.float32)

    assert not any("lm_head" in name for name, _ in backbone.named_parameters())
    assert not any(p.requires_grad for p in backbone.parameters())


def test_early_exit_keeps_the_bottom_layers(tiny_backbone: Path) -> None:
    ids = torch.arange(5)[None]
    full = load_backbone(tiny_backbone, None, torch.float32)
    exit_one = load_backbone(tiny_backbone, 1, torch.float32)

    states = full(ids, output_hidden_states=True).hidden_states

    torch.testing.assert_close(exit_one(ids).last_hidden_state, full.norm(states[1]))
    with pytest.raises(ConfigError, match="num_layers=3 exceeds the backbone's 2"):
        load_backbone(tiny_backbone, 3, torch.float32)


def test_lora_is_on_every_linear_projection(tiny_backbone: Path) -> None:
    model = add_adapter(load_backbone(tiny_backbone, None, torch.float32), AdapterConfig(rank=4))

    trained = [name for name, p in model.named_parameters() if p.requires_grad]

    assert len(trained) == 2 * 2 * 7  # A and B, 2 layers, q k v o gate up down
    assert all("lora_" in name for name in trained)


def test_casting_leaves_rotary_frequencies_in_float32(tiny_backbone: Path) -> None:
    backbone = cast_parameters(load_backbone(tiny_backbone, None, torch.float32), torch.bfloat16)

    assert {p.dtype for p in backbone.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in backbone.buffers() if b.is_floating_point()} == {torch.float32}


def test_the_identity_changes_with_the_weights(tiny_backbone: Path, tmp_path: Path) -> None:
    load_backbone(tiny_backbone, 1, torch.float32).save_pretrained(tmp_path)

    assert backbone_sha256(tiny_backbone) == backbone_sha256(tiny_backbone)
    assert backbone_sha256(tiny_backbone) != backbone_sha256(tmp_path)


def test_precision_by_name() -> None:
    cpu = torch.device("cpu")

    assert resolve_dtype("bf16", cpu) == torch.bfloat16
    assert resolve_dtype("fp32", cpu) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
