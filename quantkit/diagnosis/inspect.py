"""Contents of a checkpoint, from its headers alone."""

import math
from collections import Counter
from collections.abc import Set
from dataclasses import asdict, dataclass

from quantkit.checkpoint.check import CACHE_SCALES
from quantkit.checkpoint.output_dir import read_report
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.devices import dtype_name
from quantkit.common.result import JsonObject, Result
from quantkit.common.sizes import format_bytes
from quantkit.engines.cache_scales import find_fp8_cache
from quantkit.engines.profiles import LoadProblem
from quantkit.models import is_known
from quantkit.models.stored_parameters import check_listed, is_stored, read_model, stored_shape
from quantkit.models.table import Parameter


@dataclass(frozen=True, repr=False)
class Inspection(Result):
    """The contents of a checkpoint. left_as: number of linears in another format, by format.
    missing, misshapen, unknown: tensor names, compared with the architecture's table; these,
    parameters and mtp_layers are None for an unknown architecture. cache: FP8 of a KV cache, if the
    checkpoint has its scales or declares it. problems: what keeps `engine`
    from loading it; None if no engine was given."""

    path: str
    architecture: str | None
    format: str
    variant: str
    scheme: str | None
    tensors: int
    bytes: int
    shards: int
    quantized_linears: int
    left_as: dict[str, int]
    bytes_by_dtype: dict[str, int]
    missing: list[str] | None
    misshapen: list[str] | None
    unknown: list[str] | None
    parameters: int | None = None
    bytes_by_part: dict[str, int] | None = None
    mtp_layers: int | None = None
    cache: str | None = None
    engine: str | None = None
    problems: tuple[LoadProblem, ...] | None = None

    def to_json(self) -> JsonObject:
        """Without entries that do not apply."""
        found = asdict(self)
        for key in ("parameters", "bytes_by_part", "mtp_layers", "cache", "engine", "problems"):
            if found[key] is None:
                del found[key]
        return found

    def rows(self) -> list[JsonObject]:
        """A row for each part of the model; for an unknown architecture, for each dtype."""
        column = "dtype" if self.bytes_by_part is None else "part"
        counted = self.bytes_by_part or self.bytes_by_dtype
        return [{column: name, "bytes": count} for name, count in counted.items()]

    @property
    def heading(self) -> str:
        return self.path

    def facts(self) -> list[tuple[str, str]]:
        keys = (
            "architecture",
            "format",
            "variant",
            "scheme",
            "tensors",
            "quantized_linears",
            "shards",
        )
        rows = [(key.replace("_", " "), _text(getattr(self, key))) for key in keys]
        rows += [
            ("bytes", format_bytes(self.bytes)),
            ("parameters", _text(self.parameters)),
            ("mtp layers", _text(self.mtp_layers)),
            *([("KV cache", self.cache)] if self.cache else []),
        ]
        rows += [
            (f"  left as {name}", f"{count:,} linears") for name, count in self.left_as.items()
        ]
        rows += [
            (f"  {name}", format_bytes(count))
            for name, count in {**(self.bytes_by_part or {}), **self.bytes_by_dtype}.items()
        ]
        for key in ("missing", "misshapen", "unknown"):
            names = getattr(self, key)
            rows.append(
                (
                    "wrong shape" if key == "misshapen" else key,
                    "not checked: unknown architecture"
                    if names is None
                    else f"{len(names)} {', '.join(names[:3])}".strip(),
                )
            )
        for problem in self.problems or ():
            rows.append(
                (f"{self.engine}, {problem.severity}", f"{problem.problem}; {problem.remedy}")
            )
        if self.problems == ():
            rows.append((f"{self.engine}", "loads it"))
        return rows


def describe(checkpoint: Checkpoint) -> Inspection:
    """Raises QuantkitError if config.json is invalid for its architecture."""
    tensors = checkpoint.tensors.values()
    by_dtype = Counter[str]()
    for tensor in tensors:
        by_dtype[dtype_name(tensor.dtype)] += tensor.nbytes
    left = Counter(
        linear.format.name
        for linear in checkpoint.linears.values()
        if linear.format is not checkpoint.format
    )
    cache = find_fp8_cache(checkpoint)
    return Inspection(
        path=str(checkpoint.path),
        architecture=model_type
        if isinstance(model_type := checkpoint.config.get("model_type"), str)
        else None,
        format=checkpoint.format.name,
        variant=checkpoint.format.variant,
        scheme=_own_scheme(checkpoint) or (checkpoint.scheme.name if checkpoint.scheme else None),
        tensors=len(tensors),
        bytes=sum(by_dtype.values()),
        shards=len({tensor.shard for tensor in tensors}),
        quantized_linears=len(checkpoint.linears),
        left_as=dict(left),
        bytes_by_dtype=dict(by_dtype.most_common()),
        cache=cache.text if cache else None,
        **_against_table(
            checkpoint,
            checkpoint.cache_scale_names
            if cache is None
            else set(filter(CACHE_SCALES.fullmatch, checkpoint.tensors)),
        ),
    )


def _own_scheme(checkpoint: Checkpoint) -> str | None:
    """As report.json of quantkit's own output says; tensors do not show the methods."""
    scheme = read_report(checkpoint.path).get("scheme") if checkpoint.has_weights else None
    return scheme if isinstance(scheme, str) else None


def _against_table(checkpoint: Checkpoint, cache_scales: Set[str]) -> JsonObject:
    if not is_known(checkpoint.config):
        check_listed(checkpoint, [])
        return {"missing": None, "misshapen": None, "unknown": None}
    model = read_model(checkpoint)
    by_part, owned, missing, misshapen = Counter[str](), set[str](), [], []
    for row in model.rows:
        stored = _stored(checkpoint, row)
        if not stored:
            missing.append(row.name)
        elif stored_shape(checkpoint, row) != row.shape:
            misshapen.append(row.name)
        owned.update(stored)
        by_part[row.part] += sum(checkpoint.tensors[name].nbytes for name in stored)
    return {
        "parameters": sum(math.prod(row.shape) for row in model.rows),
        "bytes_by_part": dict(by_part.most_common()),
        "mtp_layers": model.config.num_nextn_predict_layers,
        "missing": missing,
        "misshapen": misshapen,
        "unknown": sorted(set(checkpoint.tensors) - owned - cache_scales),
    }


def _text(value: str | int | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


def _stored(checkpoint: Checkpoint, row: Parameter) -> tuple[str, ...]:
    if not is_stored(checkpoint, row):
        return ()
    return checkpoint.parts(row.module) if row.module in checkpoint.linears else (row.name,)
