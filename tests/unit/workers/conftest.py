"""A model of a few thousand parameters for the workers' tests."""

from pathlib import Path

import pytest

from drumroll.config.models import ModelConfig
from drumroll.models.prepare import prepare_model

SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = {"characters": "0123456789=", "config": {**SIZE, "max_position_embeddings": 32}}
    return prepare_model(ModelConfig.model_validate({"scratch": scratch}), tmp_path_factory.mktemp("model") / "m", seed=0)
