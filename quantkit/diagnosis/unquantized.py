"""Faults of unquantized tensors: all zeros, another size than others of their kind, repeated rows,
bytes of another dtype, an unused head or bias; and of activation and cache scales."""

import hashlib
import re
from collections.abc import Container, Iterable, Mapping
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import HEAD, SLIM_FILES
from quantkit.diagnosis import Findings
from quantkit.diagnosis.description import Description
from quantkit.diagnosis.measures import LARGEST_GAIN, squares
from quantkit.diagnosis.sampled_rows import is_on_grid
from quantkit.diagnosis.structure import Structure, is_tied
from quantkit.diagnosis.survey import Survey
from quantkit.diagnosis.tokenizer_checks import token_count

_FAR = 200.0
"""Factor by which a tensor's size may differ from the median of its kind: norms of first layers are
a tenth of others."""
_SAMPLED = 65536
_REPEATS, _COLUMNS = 0.25, 16
"""Share of rows that may equal the previous row, and the number of columns compared. Reserved
tokens share a row."""


_MIN_DIM = 16
"""Sampled rows per block, and the minimum size of both dimensions of a matrix to judge it."""
_NEAR, _NEAR_SHARE, _HEAVY = 1 / 8, 0.002, 30.0
"""For weights, a tenth of the values is below an eighth of the RMS, but none if the exponents were
misread. RMS over the median magnitude is 1.5 for weights, up to 3 with outliers."""
_SMALLEST = 1e-9
_LARGEST, _LARGEST_MEAN = 1e6, 1e4
"""Limits of the gains of a norm: of one, absolute and relative to the median, and of their root mean
square."""


def _misread_matrix(rows: Tensor) -> str:
    """Evidence that 16-bit values were read as the other float16 dtype: magnitudes that are all
    similar, or that have no typical size."""
    size = rows.abs()
    size = size[size.amax(1) > 0]
    if size.numel() < _MIN_DIM * _MIN_DIM * 4:
        return ""
    rms = torch.linalg.vector_norm(size, dim=1, keepdim=True) / size.shape[1] ** 0.5
    near, usual = float((size < _NEAR * rms).float().mean()), size.median(1).values
    heavy = float(
        (rms[:, 0] / usual).median()
    )  # infinite if most values are zero, which is another fault
    if near < _NEAR_SHARE and not is_on_grid(rows):
        return (
            f"{near:.2%} of its values are near zero, where weights have a tenth: its bits "
            "are those of another dtype"
        )
    if _HEAVY < heavy < float("inf") and not is_on_grid(rows):
        return (
            f"its root mean square is {heavy:.0f} times the median of its values: its bits "
            "are those of another dtype"
        )
    return ""


def _misread_gains(gains: Tensor) -> str:
    size = gains.abs()
    largest, usual = float(size.max()), float(size.median())
    if largest > _LARGEST or (usual > 0 and largest > _LARGEST * usual):
        return (
            f"a norm has a gain of {largest:.2g}, and a median gain of {usual:.2g}: its "
            "bytes are those of another dtype"
        )
    return ""


class UnquantizedCheck:
    """Call add() with the parts of each tensor, end_tensor() after its last one, then finish()."""

    def __init__(self, survey: Survey, structure: Structure, findings: Findings) -> None:
        self.survey, self.structure, self.findings = survey, structure, findings
        self.rows = {row.name: row for row in structure.rows}
        self.modules = {row.module for row in structure.rows}
        self.shared = {row.name for row in structure.rows if row.role in ("embedding", "head")}
        """Tensors that MTP layers have copies of."""
        self.tokens = token_count(survey)
        self.kinds: dict[str, dict[str, float]] = {}
        self.empty: dict[str, dict[str, float]] = {}
        """Shares of rows of zeros, by kind."""
        self.holders: dict[tuple[str, str], list[str]] = {}
        self.digests: dict[str, str] = {}
        self.absurd: dict[str, str] = {}
        self.biases: list[str] = []
        self.rotated = False
        """Whether the last norm's gains are all one: rotations fold gains into the linears."""
        self._begin()

    def _begin(self) -> None:
        self._squares, self._sum, self._count, self._seen, self._repeats = 0.0, 0.0, 0, 0, 0
        self._digest, self._misread, self._empty = hashlib.blake2b(digest_size=16), "", 0

    def add(self, name: str, part: Tensor) -> None:
        """Add the next rows of a tensor."""
        row = self.rows.get(name)
        if part.dtype.itemsize > 1:
            self._squares += squares(
                part.float() + row.gain_offset if row is not None and row.gain_offset else part
            )
            self._count += part.numel()
            flat = part.contiguous().view(-1).view(torch.uint8)
            self._digest.update(
                flat[:: max(len(flat) // _SAMPLED, 1)].contiguous().numpy().tobytes()
            )
        if part.dim() == 2 and min(part.shape) >= _MIN_DIM and not self._misread:
            self._misread = _misread_matrix(part[:: max(len(part) // _MIN_DIM, 1)].float())
        elif part.dim() == 1 and row is not None and row.role == "norm":
            self._misread = _misread_gains(part.float())
        if part.dim() == 1:
            self._sum += float(part.float().sum())
        elif part.dim() == 2:
            # Vocabulary rows after the last token are padding.
            first = part[
                : max(self.tokens - self._seen, 0) if name in self.shared else None, :_COLUMNS
            ]
            same = (first[1:] == first[:-1]).all(1)
            if name not in self.shared:  # rows of zeros are padding, which is in all layers
                empty = ~part[1:].any(1)
                same, self._empty = same & ~empty, self._empty + int(empty.sum())
            self._repeats += int(same.sum())
            self._seen += len(first)

    def end_tensor(self, name: str) -> None:
        """Judge the tensor whose parts were added."""
        kind = re.sub(r"\.\d+\.", ".N.", name)
        if self._count and name.endswith(".weight"):  # biases may have any size
            self.kinds.setdefault(kind, {})[name] = (self._squares / self._count) ** 0.5
            self.empty.setdefault(kind, {})[name] = self._empty / max(self._seen, 1)
            self.digests[name] = self._digest.hexdigest()
            if (
                len(self.survey.tensors[name].shape) == 2
                and self._squares
                and name not in self.shared
            ):
                self.holders.setdefault((kind, self.digests[name]), []).append(name)
            self._check_size(name)
        elif (
            name.endswith(".bias")
            and self._squares
            and name.removesuffix(".bias") in self.modules
            and name not in self.rows
        ):
            self.biases.append(name)
        self._begin()

    def _check_size(self, name: str) -> None:
        """Check a matrix or a norm by itself."""
        row, shape = self.rows.get(name), self.survey.tensors[name].shape
        size = (self._squares / self._count) ** 0.5
        if len(shape) == 2:
            table = row is not None and row.role == "embedding"
            if size * (1 if table else shape[1] ** 0.5) > LARGEST_GAIN:
                self.absurd[name] = f"its values have a root mean square of {size:.2g}"
            elif self._misread or 0 < size < _SMALLEST:
                self.absurd[name] = (
                    self._misread or f"its values have a root mean square of {size:.2g}"
                )
            elif size and self._repeats > _REPEATS * self._seen:
                self.absurd[name] = f"{self._repeats} of {self._seen} rows equal the row before"
        elif self._misread:
            self.absurd[name] = self._misread
        elif row is not None and row.role == "norm":
            mean = self._sum / self._count + row.gain_offset
            if mean <= 0 or size > _LARGEST_MEAN:
                self.absurd[name] = f"a norm has a mean gain of {mean:.2g}"
            self.rotated |= row.layer is None and mean == size == 1

    def finish(self, matching: Container[str] = ()) -> None:
        """Report the faults. matching: modules that equal the source."""
        for kind, sizes in self.kinds.items():
            usual = median(sizes.values())
            matrix = len(self.survey.tensors[next(iter(sizes))].shape) == 2
            for name, size in sizes.items():
                if (
                    not matrix and not self.rows
                    # Without a table a norm may be stored minus one, as Gemma's, so zeros are
                    # not a fault.
                ):
                    continue
                if size == 0 and (usual > 0 or (len(sizes) == 1 and matrix)):
                    self.absurd[name] = (
                        f"all zeros; {kind} has a root mean square of {usual:.2g} in other layers"
                    )
                elif (
                    size
                    and 0 < usual < float("inf")
                    and len(sizes) > 2
                    and not 1 / _FAR < size / usual < _FAR
                ):
                    self.absurd[name] = (
                        f"its values are {size / usual:.3g} times the size of others of its kind"
                    )
        for shares in self.empty.values():
            usual = median_low(shares.values())
            for name, share in shares.items():
                if share > usual + _REPEATS and name not in self.absurd:
                    self.absurd[name] = (
                        f"{share:.0%} of its rows are zeros, and {usual:.0%} of others'"
                    )
        absurd = {
            name: evidence
            for name, evidence in self.absurd.items()
            if name.removesuffix(".weight") not in matching
        }
        if absurd:
            self.findings.add("values-absurd", absurd, next(iter(absurd.values())))
        for names in self.holders.values():
            if len(names) > 1 and any(
                name.removesuffix(".weight") not in matching for name in names
            ):
                self.findings.add(
                    "linears-equal", names, f"{names[0]} and {names[1]} have the same bytes"
                )
        if self.biases:
            evidence = (
                f"{len(self.biases)} biases are not zero, and the architecture has none "
                "there: engines ignore them"
            )
            self.findings.add("tensors-unknown", self.biases, evidence)
        self._check_head()
        self._check_copies()

    def _check_copies(self) -> None:
        """An MTP layer's embedding and head must equal the model's own: some engines load the copy,
        others share. Heads into which gains of their norms were folded differ."""
        for role in ("embedding", "head"):
            rows = [row for row in self.structure.rows if row.role == role]
            if role == "head" and self.rotated:
                continue
            own = next((row.name for row in rows if not row.mtp), "")
            for copy in [row.name for row in rows if row.mtp]:
                layouts = {
                    (self.survey.tensors[name].shape, self.survey.tensors[name].dtype)
                    for name in (own, copy)
                    if name in self.digests
                }
                both = {own, copy} <= self.digests.keys() and len(layouts) == 1
                if both and self.digests[own] != self.digests[copy]:
                    self.findings.add(
                        "copies-differ", copy, f"it is not a copy of {own}, as it should be"
                    )

    def _check_head(self) -> None:
        """A stored head must equal the embedding if the two are tied, because engines ignore it."""
        table = next(
            (row.name for row in self.structure.rows if row.role == "embedding" and not row.mtp),
            "model.embed_tokens.weight",
        )
        if not is_tied(self.survey, self.structure) or table not in self.survey.tensors:
            return
        head, embedding = self.survey.tensors[f"{HEAD}.weight"], self.survey.tensors[table]
        rows = ((0, min(64, head.shape[0])), (0, head.shape[-1]))
        if head.shape != embedding.shape or not torch.equal(
            *(self.survey.shards.read(one, rows).float() for one in (head, embedding))
        ):
            evidence = (
                "config.json ties the head to the embedding, and another head is stored, "
                "which engines ignore"
            )
            self.findings.add("head-ignored", HEAD, evidence)


_INPUT_SCALES = (".input_scale", ".input_global_scale", ".deq_scale")
_LAYER = re.compile(r".*?\blayers\.\d+\.")
_CACHE_SCALES = re.compile(
    rf"({_LAYER.pattern})(.*)\.([kv]_scale|kv_cache_scale|kv_cache_offset|fa_[qkv]\.(?:scale|offset))"
)
_CACHE_SCALE = ".kv_cache_scale"
"""ModelSlim's scale per channel, stored with an offset."""
IS_ACTIVATION_SCALE = re.compile(
    r".*\.(?:input_scale|input_global_scale|deq_scale|pre_quant_scale|[qkv]_scale)"
)
_MAX_SCALE_RATIO = 1e5
"""Factor by which an input scale may differ from the median of its kind: layers and experts differ
by a hundred."""


_INVERTED = 500.0
"""Factor by which an inverted scale differs from the others."""
_MAX_CACHE_SCALE = 8.0
"""Keys and values of no model reach that many times 448 in most layers."""


def check_activation_scales(survey: Survey, description: Description, findings: Findings) -> None:
    """Linears of one kind all have activation scales or none, and so do layers for the cache; a
    description as static requires them."""
    missing = [*_missing_input_scales(survey, description), *_missing_cache_scales(survey)]
    if missing:
        findings.add(
            "part-missing", missing, f"{missing[0]} is not stored, and others of its kind have one"
        )
    block = survey.config.get("quantization_config") or {}
    if not description.linears:
        return
    inputs = _group_entries(block, "input_activations")
    is_static = bool(inputs) and all(one.get("dynamic") is False for one in inputs)
    is_static |= block.get("activation_scheme") == "static"
    in_order = all(
        one.get("actorder") not in ("group", True) for one in _group_entries(block, "weights")
    )
    cache = block.get("kv_cache_scheme")
    has_cache = isinstance(cache, dict) and cache.get("dynamic") is False
    ignored = [name for name in survey.tensors if name.endswith(_INPUT_SCALES)]
    of_groups = block.get("quant_method") == "compressed-tensors" and inputs
    if ignored and of_groups and not any(inputs):
        evidence = "config.json says that inputs are not quantized, and a scale of inputs is stored"
        findings.add("part-orphan", ignored, evidence)
    for is_said, name, evidence, endings in (
        (is_static, "part-missing", "it says that input scales are static", _INPUT_SCALES),
        (not in_order, "part-missing", "it says actorder group", (".weight_g_idx",)),
        (has_cache, "cache-scales-missing", "it says static scales", (".k_scale", ".v_scale")),
    ):
        if is_said and not any(tensor.endswith(endings) for tensor in survey.tensors):
            findings.add(name, "config.json", f"{evidence}, and no {endings[0][1:]} is stored")


def _missing_input_scales(survey: Survey, description: Description) -> Iterable[str]:
    slim = next((survey.side[name] for name in SLIM_FILES if name in survey.side), {})
    kinds: dict[tuple[str, object, object], list[str]] = {}
    for module, linear in description.linears.items():
        # ModelSlim describes for each linear whether its input scales are static.
        kinds.setdefault(
            (linear.format.member(module).variant, linear.grid, slim.get(f"{module}.weight")), []
        ).append(module)
    for modules in kinds.values():
        for suffix in _INPUT_SCALES:
            without = [module for module in modules if module + suffix not in survey.tensors]
            if len(without) * 2 < len(modules):
                yield from (module + suffix for module in without)


def _missing_cache_scales(survey: Survey) -> Iterable[str]:
    """Only in layers that have the module: layers with another kind of attention have no such
    scales."""
    held: dict[tuple[str, str], set[str]] = {}
    for name in survey.tensors:
        if found := _CACHE_SCALES.fullmatch(name):
            held.setdefault((found[2], found[3]), set()).add(found[1])
    modules = {name.rpartition(".")[0] for name in survey.tensors}
    layers = {found[0] for name in survey.tensors if (found := _LAYER.match(name))}
    for scale in [name for name in survey.tensors if name.endswith(_CACHE_SCALE)]:
        if (offset := scale.removesuffix(_CACHE_SCALE) + ".kv_cache_offset") not in survey.tensors:
            yield offset
    for (inside, scale), own in held.items():
        matching_layers = {
            layer
            for layer in layers
            if any(f"{module}.".startswith(f"{layer}{inside}.") for module in modules)
        }
        if len(matching_layers - own) * 2 < len(matching_layers):
            yield from (f"{layer}{inside}.{scale}" for layer in sorted(matching_layers - own))


def _group_entries(block: Mapping[str, Any], what: str) -> list[Mapping[str, Any]]:
    """The entries `what` of compressed-tensors' groups; {} for a group without."""
    groups = block.get("config_groups")
    found = (
        [one.get(what) for one in groups.values() if isinstance(one, dict)]
        if isinstance(groups, dict)
        else []
    )
    return [one if isinstance(one, dict) else {} for one in found]


class ActivationScaleCheck:
    """Call add() for each scale, then finish(): zero and negative scales are faults."""

    def __init__(self) -> None:
        self.sizes: dict[str, dict[str, float]] = {}
        self.zero: list[str] = []
        self.negative: list[str] = []

    def add(self, name: str, values: Tensor) -> None:
        """name: matches IS_ACTIVATION_SCALE."""
        values = values.float()
        if not bool(values.any()):
            self.zero.append(name)
        elif bool((values < 0).any()):
            self.negative.append(name)
        elif values.numel() == 1:
            self.sizes.setdefault(re.sub(r"\.\d+\.", ".N.", name), {})[name] = float(values)

    def finish(self, findings: Findings) -> None:
        """Report the faults."""
        if self.zero:
            findings.add("scales-zero", self.zero, "a scale of inputs or of the cache is zero")
        if self.negative:
            findings.add(
                "scales-absurd", self.negative, "a scale of inputs or of the cache is negative"
            )
        for kind, sizes in self.sizes.items():
            usual, off = median(sizes.values()), dict[str, str]()
            for name, size in sizes.items():
                if not 1 / _MAX_SCALE_RATIO < size / usual < _MAX_SCALE_RATIO:
                    off[name] = f"{size / usual:.1e} times the median of {kind}"
                elif _is_inverted(size, usual):
                    off[name] = f"it is {size:.3g}, and the median of {kind} {usual:.3g}: inverted"
            if not off and kind.endswith((".k_scale", ".v_scale")) and usual > _MAX_CACHE_SCALE:
                evidence = (
                    f"the median of {kind} is {usual:.3g}: cached values would reach "
                    f"{448 * usual:.0f}; it is inverted"
                )
                off = dict.fromkeys(sizes, evidence)
            if off:
                findings.add("scales-absurd", off, next(iter(off.values())))


def _is_inverted(size: float, usual: float) -> bool:
    """Whether a scale differs widely from the others, but its inverse does not."""
    off, inverted = max(size / usual, usual / size), max(size * usual, 1 / (size * usual))
    return off > _INVERTED and inverted < 4
