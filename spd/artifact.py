"""The artifact: a folder that holds a trained ranker, without pickle and without the frozen backbone.

ranker.json                  RankerSpec: backbone id and hash, prompt, K, head, decoder, ...
adapter_model.safetensors    LoRA weights, with PEFT's adapter_config.json (absent for a frozen backbone)
head.safetensors             head weights, float32 (absent for objective = "ar")
tokenizer.json, ...          the tokenizer
manifest.json                sha256 of every other file, checked at load
"""

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spd.backbone import (
    BackboneConfig,
    Precision,
    backbone_sha256,
    cast_parameters,
    load_backbone,
    load_tokenizer,
    quiet_loading,
    resolve_backbone,
    resolve_dtype,
)
from spd.config import build_config
from spd.decode import DecoderName
from spd.errors import ArtifactError, ConfigError
from spd.head import HeadName, build_head
from spd.manifest import MANIFEST_FILE, SPEC_FILE, check_manifest, read_json_object, write_json_object, write_manifest
from spd.model import RankerModel
from spd.prompt import Encoder, PromptConfig
from spd.sinkhorn import DEFAULT_ITERATIONS, sinkhorn_problems

Objective = Literal["spd", "ar"]

FORMAT_VERSION = 2
HEAD_FILE = "head.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankerSpec:
    """Everything but weights that a ranker needs to give the same ranking again."""

    backbone: BackboneConfig
    """The backbone that the adapter and head were trained on."""
    backbone_sha256: str
    """Identity of that backbone's files."""
    prompt: PromptConfig = field(default_factory=PromptConfig)
    """How slates are written out."""
    objective: Objective = "spd"
    """spd: a head reads the order off one pass. ar: an autoregressive ranker, which has no head and writes it out."""
    num_positions: int
    """K, the columns of the score matrix."""
    max_trained_candidates: int
    """Largest slate trained on: later columns of the matrix have learned nothing."""
    head: HeadName = "self_attention"
    """Which of the three heads."""
    decoder: DecoderName = "lap"
    """Decoder used unless the caller names another."""
    tau: float = 1.0
    """Sinkhorn temperature of training."""
    sinkhorn_iterations: int = DEFAULT_ITERATIONS
    """Sinkhorn iterations of training."""
    has_adapter: bool = True
    """Whether there are LoRA weights, or the backbone stayed as it was."""
    format_version: int = FORMAT_VERSION
    """Layout of the artifact folder."""

    def problems(self) -> list[str]:
        sizes = ("num_positions", "max_trained_candidates")
        found = [f"{name}={getattr(self, name)} must be at least 1" for name in sizes if getattr(self, name) < 1]
        return found + sinkhorn_problems(self.tau, self.sinkhorn_iterations)

    @property
    def max_candidates(self) -> int:
        """Largest slate ranked in one pass: min(K, largest N trained on)."""
        return min(self.num_positions, self.max_trained_candidates)


def save_artifact(
    folder: Path,
    spec: RankerSpec,
    tokenizer: PreTrainedTokenizerBase,
    head_state: Mapping[str, Tensor],
    adapter: tuple[Mapping[str, Tensor], PeftModel] | None,
) -> None:
    """Write the artifact aside and rename it into place; raises ArtifactError if `folder` exists already.

    head_state, and the adapter's state (with the PEFT model that it belongs to), are float32 tensors by name.
    """
    if folder.exists():
        raise ArtifactError(f"artifact folder {str(folder)!r} exists: choose another, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(aside)
        if spec.objective == "spd":
            save_file({name: tensor.contiguous() for name, tensor in head_state.items()}, aside / HEAD_FILE)
        if adapter is not None:
            _save_adapter(aside, *adapter, spec.backbone.source)
        write_json_object(aside / SPEC_FILE, asdict(spec))
        write_manifest(aside)
        aside.chmod(0o755)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load_spec(folder: Path) -> RankerSpec:
    """Return the spec of an artifact whose files all match its manifest; raises ArtifactError naming what does not."""
    if not folder.is_dir():
        raise ArtifactError(f"artifact={str(folder)!r} is no folder: give the output folder of jobs.train")
    check_manifest(folder)
    values = read_json_object(folder / SPEC_FILE)
    has_head = (folder / HEAD_FILE).is_file()
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"artifact {str(folder)!r}: format_version={version!r}, this release reads {FORMAT_VERSION}: "
            "train again, or install the release that wrote it"
        )
    try:
        spec = build_config(RankerSpec, values)
    except ConfigError as error:
        raise ArtifactError(f"artifact {str(folder)!r}: {SPEC_FILE}: {error}") from None
    if spec.objective == "spd" and not has_head:
        raise ArtifactError(f"artifact {str(folder)!r}: {HEAD_FILE} is missing: copy the whole folder again")
    return spec


def model_version(folder: Path) -> str:
    """Return 12 hex digits that identify the artifact's contents."""
    return hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()[:12]


def load_encoder(folder: Path, spec: RankerSpec) -> Encoder:
    """Return the encoder of an artifact: CPU only, no weights."""
    return Encoder(load_tokenizer(folder), spec.prompt)


def load_model(
    folder: Path,
    spec: RankerSpec,
    device: torch.device,
    precision: Precision | None = None,
    backbone_source: str | None = None,
) -> RankerModel:
    """Return the model in inference mode, LoRA merged in float32 before any cast.

    precision and backbone_source override the spec's; another source must hold the same files.
    Raises ArtifactError when the backbone's hash or a tensor's shape is not what the spec says.
    """
    if spec.objective != "spd":
        raise ArtifactError(
            f"artifact {str(folder)!r} is an autoregressive ranker (objective='ar'): load it with ArRanker, or label "
            "slates with it (jobs.label) and train a student on them"
        )
    backbone = load_merged_backbone(folder, spec, backbone_source)
    head = build_spec_head(spec, int(backbone.config.hidden_size))
    _load_head(folder, head)
    dtype = resolve_dtype(precision or spec.backbone.precision, device)
    return _for_inference(RankerModel(cast_parameters(backbone, dtype), head, spec.prompt.attention), device)


def load_merged_backbone(folder: Path | None, spec: RankerSpec, backbone_source: str | None = None) -> PreTrainedModel:
    """Return the float32 backbone with the artifact's LoRA merged in; without a folder, as it came.

    Raises ArtifactError when the backbone's hash or a tensor's shape is not what the spec says.
    """
    loaded = load_backbone(check_backbone(spec, backbone_source), spec.backbone.num_layers, torch.float32)
    if folder is None or not spec.has_adapter:
        return loaded
    merged: PreTrainedModel = _load_adapter(folder, loaded).merge_and_unload()
    return merged


def build_spec_head(spec: RankerSpec, hidden_size: int) -> torch.nn.Module:
    """Return a fresh head of the spec over hidden states and features."""
    return build_head(spec.head, hidden_size + spec.prompt.num_features, spec.num_positions)


def build_untrained_model(
    spec: RankerSpec,
    device: torch.device,
    seed: int,
    precision: Precision | None = None,
    backbone_source: str | None = None,
) -> RankerModel:
    """Return the spec's backbone as it came, under a head with fresh weights: what training is measured against."""
    backbone = load_merged_backbone(None, spec, backbone_source)
    torch.manual_seed(seed)
    head = build_spec_head(spec, int(backbone.config.hidden_size))
    dtype = resolve_dtype(precision or spec.backbone.precision, device)
    return _for_inference(RankerModel(cast_parameters(backbone, dtype), head, spec.prompt.attention), device)


def load_trained_state(folder: Path, backbone: torch.nn.Module, head: torch.nn.Module | None) -> None:
    """Load an artifact's adapter into an adapted backbone, and its head: a warm start.

    An artifact of fewer layers starts the bottom ones; the others keep their fresh weights, which change nothing yet.
    Raises ArtifactError when a tensor does not fit.
    """
    if isinstance(backbone, PeftModel):
        fresh = get_peft_model_state_dict(backbone, save_embedding_layers=False)
        trained = load_file(folder / ADAPTER_FILE)
        unlike = [name for name, tensor in trained.items() if name not in fresh or fresh[name].shape != tensor.shape]
        if unlike:
            raise ArtifactError(
                f"artifact {str(folder)!r}: {ADAPTER_FILE}: {min(unlike)} does not fit: set the same adapter.rank, and "
                "backbone.num_layers not below the artifact's"
            )
        set_peft_model_state_dict(backbone, fresh | trained)
    if head is not None:
        _load_head(folder, head)


def check_backbone(spec: RankerSpec, source_override: str | None = None) -> Path:
    """Return the folder of the spec's backbone; raises ArtifactError if it is missing or another one."""
    source = source_override or spec.backbone.source
    backbone_folder = resolve_backbone(source)
    found = backbone_sha256(backbone_folder)
    if found != spec.backbone_sha256:
        raise ArtifactError(
            f"backbone {source!r} has hash {found[:12]}, the artifact was trained on {spec.backbone_sha256[:12]} "
            f"({spec.backbone.source!r}): point it at that backbone, or train again on this one"
        )
    return backbone_folder


def _for_inference(model: RankerModel, device: torch.device) -> RankerModel:
    return model.to(device).eval().requires_grad_(False)


def _load_head(folder: Path, head: torch.nn.Module) -> None:
    try:
        head.load_state_dict(load_file(folder / HEAD_FILE))
    except (RuntimeError, SafetensorError, OSError) as error:
        raise ArtifactError(
            f"artifact {str(folder)!r}: {HEAD_FILE} does not fit {SPEC_FILE} (head, num_positions, backbone): {error}"
        ) from None


def _load_adapter(folder: Path, backbone: PreTrainedModel) -> PeftModel:
    """Return the backbone with the artifact's LoRA weights; raises ArtifactError unless they fit it one to one."""
    try:
        with quiet_loading():
            model = PeftModel.from_pretrained(backbone, folder)
        stored, wanted = (
            load_file(folder / ADAPTER_FILE).keys(),
            get_peft_model_state_dict(model, save_embedding_layers=False).keys(),
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(f"artifact {str(folder)!r}: {ADAPTER_FILE} cannot be loaded ({reason})") from None
    if stored != wanted:
        name = min(stored ^ wanted)
        raise ArtifactError(
            f"artifact {str(folder)!r}: {ADAPTER_FILE} does not fit the backbone and {ADAPTER_CONFIG_FILE} (first "
            f"difference: {name}): copy or train it again"
        )
    return model


def _save_adapter(folder: Path, state: Mapping[str, Tensor], model: PeftModel, source: str) -> None:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / ADAPTER_FILE)
    config = model.active_peft_config
    config.base_model_name_or_path = source  # PEFT would write the cache folder of this machine
    config.inference_mode = True
    config.save_pretrained(folder)
