"""What every test of the executor leaves as it found it, and a model that is easy to guess for."""

import os

import make_model
import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_and_environment():
    """An engine of several ranks sets both for its whole process."""
    threads, environment = torch.get_num_threads(), dict(os.environ)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="session")
def easy_checkpoint(tmp_path_factory):
    """A model whose next token depends on little but the last one, and whose MTP layer knows that
    rule: guesses are often right.

    Residual branches are made small, so hidden states are nearly the embeddings and logits nearly
    lm_head(embedding); eh_proj passes the embedding of the next token through.
    """
    config = make_model.tiny_config()
    tensors = make_model.random_tensors(config)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 0.2
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 6  # sampled tokens follow the rule too
    mtp = f"model.layers.{config['num_hidden_layers']}"
    tensors[f"{mtp}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{mtp}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{mtp}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors[f"{mtp}.enorm.weight"] = torch.ones_like(tensors[f"{mtp}.enorm.weight"])
    tensors[f"{mtp}.eh_proj.weight"] = torch.cat(
        (torch.eye(256), torch.zeros(256, 256)), dim=1
    ).bfloat16()
    return make_model.write_fp8(tmp_path_factory.mktemp("models") / "easy", config, tensors)
