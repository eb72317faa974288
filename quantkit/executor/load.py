"""From a checkpoint directory to a model that computes: the part that every verb shares."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.devices import find_device, find_dtype
from quantkit.executor.weights import ExecutorWeights
from quantkit.models import find_architecture


@dataclass(frozen=True)
class LoadedModel:
    """`model` and `config` are the architecture file's Model and Config; `nbytes` is what the prepared weights hold."""

    model: Any
    config: Any
    checkpoint: Checkpoint
    weights: ExecutorWeights
    device: torch.device
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes


def load_model(path: Path, *, device: str = "auto", backend: str = "auto", dtype: str | None = None) -> LoadedModel:
    """Open, check and prepare. Raises QuantkitError for a fault of the checkpoint, the architecture, the device or the backend."""
    checkpoint = Checkpoint.open(Path(path))
    architecture = find_architecture(checkpoint.config)
    config = architecture.Config.from_dict(checkpoint.config)
    target = find_device(device)
    compute = find_dtype(dtype, target)
    weights = ExecutorWeights(checkpoint, architecture.parameters(config), device=target, dtype=compute, backend=backend)
    with torch.inference_mode():
        model = architecture.Model(config, weights)
    return LoadedModel(model, config, checkpoint, weights, target, compute)
