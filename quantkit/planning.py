"""plan(): what a quantization will need and make, and where the result runs, from config.json and safetensors headers alone.

Sizes are those of the tensors that quantize() would write, to the byte. Memory and time are estimates whose assumptions are told.
"""

import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from quantkit.checkpoint.formats import find_format
from quantkit.checkpoint.formats.base import Format
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.memory import ParallelSizes, fit_rows
from quantkit.errors import QuantkitError
from quantkit.models.table import Parameter
from quantkit.quantization.checks import Inventory, check_groups, take_inventory
from quantkit.quantization.cost import RATES, seconds
from quantkit.quantization.memory import parse_bytes
from quantkit.quantization.run import expected_peak, with_group_size
from quantkit.recipe import Recipe, load_recipe
from quantkit.schemes import Scheme, check_pair

MEMORY_FRACTION = 0.9
"""Of a device's memory that an engine uses."""
RESERVE_GIB = 4.0
"""Of that, for activations, graphs and communication."""


def plan(
    model: Path,
    scheme: Scheme,
    format: str = "auto",
    *,
    recipe: Recipe | None = None,
    devices: str = "8x64GiB",
    samples: int = 128,
    seq_len: int = 512,
    context: int = 4096,
) -> dict[str, Any]:
    """What quantize(model, scheme, format) will write and need, and whether its output serves `context` tokens on `devices`.

    devices: "8x64GiB", tensor parallel over all of them. JSON-ready; bytes are integers, times are in seconds. Raises QuantkitError
    where quantize() would refuse the source.
    """
    settings = (recipe or load_recipe(scheme.name)).model_copy(update={"samples": samples, "seq_len": seq_len})
    name = scheme.formats[0] if format == "auto" else format
    check_pair(scheme, name)
    scheme = with_group_size(scheme, settings)
    target = find_format(name, scheme)
    count, each = parse_devices(devices)
    checkpoint = Checkpoint.open(model)
    inventory = take_inventory(checkpoint)
    check_groups(inventory.rows, scheme, target)
    rows = [(row, _written_bytes(checkpoint, row, target, scheme)) for row in inventory.rows]
    output = sum(size for _, size in rows)
    (peak, _), (least, _) = (expected_peak(inventory, target, scheme, settings, memory) for memory in (None, 0))
    state = 2 * peak.hidden  # of the last finished layer, and of its successor while they are written
    return {
        "model": str(model),
        "scheme": scheme.name,
        "format": name,
        "source_bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "output_bytes": output,
        "output_bytes_without_mtp": sum(size for row, size in rows if not row.mtp),
        "output_bytes_by_part": _by_part(rows),
        **_placed(rows, inventory, count, each, context),
        "host_peak_bytes": peak.total,
        "host_least_bytes": least.total,
        "host_peak": {"process": peak.process, "hidden_states": peak.hidden, "work": peak.work, "where": peak.where},
        "disk_bytes": output + state,
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "time": _times(inventory, target, scheme, settings, checkpoint, output),
    }


def parse_devices(text: str) -> tuple[int, int]:
    """ "8x64GiB" -> (8, bytes of one)."""
    found = re.fullmatch(r"(\d+)x(.+)", text)
    if not found or int(found[1]) < 1:
        raise QuantkitError(f"devices {text!r} make no sense", "write them as 8x64GiB")
    return int(found[1]), parse_bytes(found[2])


def _written_bytes(checkpoint: Checkpoint, row: Parameter, target: Format, scheme: Scheme) -> int:
    """Of the tensors that one parameter becomes; one left unquantized keeps its type, and is BF16 where the source packs it."""
    if target.quantizes(row.module, row.role, mtp=row.mtp):
        grid = scheme.grid(expert=row.expert is not None, mtp=row.mtp)
        return sum(spec.nbytes for spec in target.specs(row.module, (row.shape[0], row.shape[1]), grid))
    if row.module in checkpoint.linears:
        return 2 * row.shape[0] * row.shape[1]
    return checkpoint.tensors[row.name].nbytes


def _by_part(rows: list[tuple[Parameter, int]]) -> dict[str, int]:
    parts = Counter[str]()
    for row, size in rows:
        parts[row.part] += size
    return dict(parts.most_common())


def _placed(rows: list[tuple[Parameter, int]], inventory: Inventory, count: int, each: int, context: int) -> dict[str, Any]:
    found = fit_rows(rows, inventory.config, ParallelSizes(count), context, each / 2**30, MEMORY_FRACTION, RESERVE_GIB)
    return {
        "fits": found.fits,
        "devices": {
            "count": count,
            "memory_bytes": each,
            "usable_bytes": found.usable_bytes,
            "weight_bytes": found.weight_bytes,
            "reserve_bytes": found.reserve_bytes,
            "cache_bytes": max(found.usable_bytes - found.reserve_bytes - found.weight_bytes, 0),
            "cache_bytes_per_token": found.cache_bytes_per_token,
            "cache_tokens": found.tokens,
            "context": context,
            "assumption": f"tensor parallel over {count}, MTP layer not loaded, {MEMORY_FRACTION:.0%} of each device usable, "
            f"{RESERVE_GIB:g} GiB of that for activations, BF16 cache; MLA's latent is whole on every device",
        },
    }


def _times(
    inventory: Inventory, target: Format, scheme: Scheme, recipe: Recipe, checkpoint: Checkpoint, output: int
) -> list[dict[str, Any]]:
    """On this machine's processor and on one H200."""
    methods = scheme.methods if recipe.methods is None else recipe.methods
    tokens = (recipe.samples + recipe.held_out) * recipe.seq_len if methods else 0
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    linears = [row for row in inventory.rows if target.quantizes(row.module, row.role, mtp=row.mtp)]
    experts = len({row.expert for row in inventory.rows if row.expert is not None})
    chosen = inventory.config.routing.num_experts_per_tok / experts if experts else 1.0
    return [
        {
            "device": rate.name,
            "seconds": round(seconds(linears, tokens, chosen, stored + output, rate, os.cpu_count() or 1)),
            "assumption": rate.assumption(os.cpu_count() or 1),
        }
        for rate in RATES
    ]
