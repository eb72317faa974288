"""Fixtures that several packages' tests share."""

from pathlib import Path

import make_model
import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random DeepSeek-V3 in R1's FP8 layout: three shards, tokenizer, chat template. Read-only: copy it to change it."""
    config = make_model.tiny_config()
    return make_model.write_fp8(tmp_path_factory.mktemp("models") / "tiny-fp8", config, make_model.random_tensors(config))


@pytest.fixture(scope="session")
def tiny_dense_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `tiny_checkpoint`, never quantized (BF16). Read-only."""
    config = make_model.tiny_config()
    return make_model.write_dense(tmp_path_factory.mktemp("models") / "tiny-bf16", config, make_model.random_tensors(config))
