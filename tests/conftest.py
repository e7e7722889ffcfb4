"""Shared fixtures: a tiny backbone of the true architecture class, built on the spot, no network."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from spd.artifact import RankerSpec, save_artifact
from spd.backbone import AdapterConfig, BackboneConfig, add_adapter, backbone_sha256, load_backbone, load_tokenizer
from spd.head import build_head
from spd.model import RankerModel
from spd.prompt import PromptConfig
from spd.ranker import Ranker
from spd.slate import Candidate, Slate

TRAINING_TEXT = ["Rank the candidates by how well they suit the query.", "Star Wars", "Fargo", "Toy Story", "[1] > [2]"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep torch on one thread: tiny tensors gain nothing from two, and lose much beside another busy process."""
    torch.set_num_threads(1)


def build_tiny_backbone(folder: Path) -> None:
    """Write a 2-layer Llama (about 35k parameters) with a byte-level tokenizer into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|start|>", "<|end|>"])
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaModel(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random backbone and its tokenizer."""
    folder = tmp_path_factory.mktemp("backbone")
    build_tiny_backbone(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_artifact(tiny_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with random adapter and head over the tiny backbone, K = 32."""
    folder = tmp_path_factory.mktemp("artifacts") / "tiny"
    build_tiny_artifact(tiny_backbone, folder)
    return folder


def build_tiny_artifact(
    backbone_folder: Path,
    folder: Path,
    num_positions: int = 32,
    seed: int = 0,
    prompt: PromptConfig = PromptConfig(),  # noqa: B008 (frozen)
) -> RankerModel:
    """Write an artifact with random weights; returns the unmerged model that it holds."""
    from peft import PeftModel, get_peft_model_state_dict

    torch.manual_seed(seed)
    backbone = load_backbone(backbone_folder, None, torch.float32)
    adapted = add_adapter(backbone, AdapterConfig(rank=4, alpha=8))
    assert isinstance(adapted, PeftModel)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)  # PEFT starts B at zero: an adapter that changes nothing tests nothing
    head = build_head("self_attention", 32 + prompt.num_features, num_positions)
    model = RankerModel(adapted, head, prompt.attention).eval()
    spec = RankerSpec(
        backbone=BackboneConfig(source=str(backbone_folder), precision="fp32"),
        backbone_sha256=backbone_sha256(backbone_folder),
        prompt=prompt,
        num_positions=num_positions,
        max_trained_candidates=num_positions,
        has_adapter=True,
    )
    adapter = (get_peft_model_state_dict(adapted, save_embedding_layers=False), adapted)
    save_artifact(folder, spec, load_tokenizer(backbone_folder), model.head.state_dict(), adapter)
    return model


def build_tiny_teacher(backbone_folder: Path, folder: Path) -> None:
    """Write an autoregressive artifact with no adapter, markers, K = 32."""
    spec = RankerSpec(
        objective="ar",
        backbone=BackboneConfig(source=str(backbone_folder), precision="fp32"),
        backbone_sha256=backbone_sha256(backbone_folder),
        prompt=PromptConfig(identifiers="markers"),
        num_positions=32,
        max_trained_candidates=32,
        has_adapter=False,
    )
    save_artifact(folder, spec, load_tokenizer(backbone_folder), {}, None)


@pytest.fixture(scope="session")
def tiny_ranker(tiny_artifact: Path) -> Ranker:
    """The tiny artifact, loaded on the CPU."""
    return Ranker.from_pretrained(tiny_artifact, device=torch.device("cpu"))


def make_slate(size: int, request_id: str = "r1", query: str = "space opera") -> Slate:
    """Return a slate of `size` candidates with distinct texts of different lengths."""
    candidates = tuple(Candidate(f"c{i}", f"movie {i} " + "x" * (7 * i % 11)) for i in range(size))
    return Slate(request_id=request_id, query=query, candidates=candidates)
