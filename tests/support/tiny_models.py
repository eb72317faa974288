"""Tiny models of every architecture: their config.json (tiny_models.yaml) and random tensors."""

from pathlib import Path

import make_model
import torch
import yaml

from quantkit.models import find_architecture

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
MODELS = Path(__file__).parents[1] / "models"
CASES = yaml.safe_load((MODELS / "cases.yaml").read_text())
"""Cases of the tests of models."""


def _config(entry):
    base = make_model.tiny_config(**entry["tiny_config"]) if "tiny_config" in entry else {}
    left = {"tiny_config", "without", *entry.get("without", ())}
    own = {key: _config(one) if key == "text_config" else one for key, one in entry.items()}
    return {key: value for key, value in {**base, **own}.items() if key not in left}


CONFIGS = {
    name: {**_config(entry), "model_type": name} for name, entry in TABLE["architectures"].items()
}
CELLS = TABLE["cells"]
PROMPTS = [list(range(10 + i, 30 + 2 * i)) for i in range(3)]


def random_tensors(config):
    architecture = find_architecture(config)
    read, numbers = architecture.Config.from_dict(config), {}
    rows = architecture.parameters(read)
    for row in rows:
        if row.role == "state" and ".ple_embedding." in row.name:
            number = read.ngrams[row.layer].numbers[row.name.rpartition(".")[2]]
            numbers[row.name] = torch.tensor(number)
    drawn = [row for row in rows if row.name not in numbers]
    tensors = rows_of(drawn, torch.Generator().manual_seed(11)) | numbers
    if not any(row.role == "head" for row in rows):
        # An embedding that is the head says its own token again, with certainty if it is large.
        for row in rows:
            if row.role == "embedding":
                tensors[row.name] *= row.shape[-1] ** -0.5
    return tensors


def rows_of(rows, generator):
    """Random tensors of a table's rows."""
    tensors = {}
    for row in rows:
        noise = torch.randn(row.shape, generator=generator)
        if row.role == "ngram_table":
            scale = row.name.endswith("scale")
            codes = (noise > 0) + 1.0 if scale else noise
            dtype = torch.float8_e8m0fnu if scale else torch.float8_e4m3fn
            tensors[row.name] = codes.to(dtype)
            continue
        if row.role == "router_table":
            tensors[row.name] = (noise[:, :1].abs() * 97).long() % 3 + torch.arange(
                row.shape[1]
            ) % 4
            continue
        spread = 1.0 if row.role in ("embedding", "head") else row.shape[-1] ** -0.5
        value = 1 + 0.1 * noise if row.role == "norm" else noise * spread
        tensors[row.name] = value if row.role == "router_bias" else value.bfloat16()
    return tensors


def write(path, name, **changes):
    """The checkpoint of an architecture, unquantized."""
    config = {**CONFIGS[name], **changes}
    return make_model.write_dense(path, config, random_tensors(config))
