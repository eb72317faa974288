"""A head that config.json ties to the embedding and that is stored all the same, as some publishers
do."""

from collections.abc import Iterable

import torch

from quantkit.checkpoint.formats.base import HEAD
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.models.table import Parameter


def check_stored_head(checkpoint: Checkpoint, rows: Iterable[Parameter]) -> None:
    """Raises QuantkitError where a stored head, which the table of a tied model has no row for, is
    not the embedding.

    Engines disagree on such a checkpoint: transformers computes with the stored head, vLLM with the
    embedding.
    """
    roles = {row.role: row.name for row in rows if not row.mtp}
    stored, embedding = f"{HEAD}.weight", roles.get("embedding")
    if "head" in roles or embedding is None or not checkpoint.has(stored):
        return
    if not torch.equal(checkpoint.read(stored), checkpoint.read(embedding)):
        told = (
            f"{stored} in {checkpoint.path} differs from {embedding}, to which config.json ties it"
        )
        raise QuantkitError(told, 'set "tie_word_embeddings": false in config.json')
