"""Models are loaded whole, also by several threads at the same time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drumroll.config.models import ScratchConfig
from drumroll.errors import ModelError
from drumroll.models.loading import check_complete, load_model
from drumroll.models.scratch import make_scratch

SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_scratch(ScratchConfig(characters="abc", config=SIZES), tmp_path / "model", 0)
    return tmp_path / "model"


def test_threads_that_load_at_the_same_time_leave_tied_embeddings_tied(folder: Path) -> None:
    def load(_: int) -> bool:
        model, missing = load_model(folder, "lm", dtype=torch.float32)
        return missing == [] and model.lm_head.weight is model.model.embed_tokens.weight

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(load, range(24)))


def test_weights_that_are_missing_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _, missing = load_model(folder, "lm")
    with pytest.raises(ModelError, match=r"lacks weights of its model: model\.norm\.weight"):
        check_complete(folder, missing)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded as a classifier"):
        load_model(tmp_path, "classifier")
