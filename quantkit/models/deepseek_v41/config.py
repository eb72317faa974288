"""DeepSeek-V4.1's config.json, whose text model is in text_config or at the top."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

from quantkit.common.result import JsonObject
from quantkit.models.architecture import CompressedCache
from quantkit.models.config import (
    DECIDED,
    CountOrNone,
    check_at_most,
    check_count,
    read_fields,
    refusal,
    refuse_other_values,
)
from quantkit.models.deepseek_v4 import config as deepseek_v4
from quantkit.models.deepseek_v4.config import COMPUTED, check_scoring, check_sizes, read_ropes
from quantkit.models.deepseek_v41.ahead_streams import AheadSizes
from quantkit.models.deepseek_v41.engram import EngramLayout
from quantkit.models.hyper_connections import HyperConnectionNames
from quantkit.tokenizer.token_classes import token_classes

_COMPUTED: JsonObject = COMPUTED | {
    "hc_pre_from_prev_sublayer": True,
    "q_head_norm": False,
    "num_hash_layers": 0,
    "gate_temp": 1.0,
}
_STREAMS = HyperConnectionNames(end=None)
_RATIOS = "0, 1 or 2"
_COPIED = ("mtp.", "vision.", "aligner.", "image_start", "image_end", "image_newline")


@dataclass(frozen=True)
class Config(deepseek_v4.Config):
    """Fields as config.json names them. ratios: tokens per entry that each layer reads, 0 without;
    sources: of each layer, the one whose entries it reads, -1 without; selecting: layers with an
    indexer; engram: n-gram tables, None without; dspark: the head in mtp.* (dspark.py)."""

    candidate_topk_blocks: CountOrNone = 0
    candidate_block_size: CountOrNone = 0
    candidate_source: Annotated[int, DECIDED] = -1
    ratios: Annotated[tuple[int, ...], DECIDED] = ()
    sources: Annotated[tuple[int, ...], DECIDED] = ()
    selecting: Annotated[frozenset[int], DECIDED] = frozenset()
    engram: Annotated[EngramLayout | None, DECIDED] = None

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed by this file."""
        text = config if config.get("text_config") is None else config["text_config"]
        if not isinstance(text, dict):
            raise refusal("text_config", text, "an object")
        for fields in (config, text):
            refuse_other_values(fields, _COMPUTED, "DeepSeek-V4.1", allow_null=True)
        check_scoring(text)
        made = cls(**read_fields(cls, {**text, "num_nextn_predict_layers": 0}))
        ratios, sources, selecting = _read_schedule(text, made.num_hidden_layers)
        made = replace(
            made,
            ratios=ratios,
            sources=sources,
            selecting=selecting,
            candidate_source=_read_candidate_source(text, made, sources, selecting),
            ropes=read_ropes(text, made.head_dim),
            engram=EngramLayout.from_dict(text, made.num_hidden_layers, made.vocab_size),
            dspark=made.read_dspark(text),
        )
        check_sizes(made)
        rotary = max(rope.dim for rope in made.ropes)
        check_at_most(
            "the rotary embedding's channels", rotary, "index_head_dim", made.index_head_dim
        )
        return made

    def _of_stages(self) -> Self:
        layers = self.num_hidden_layers + self.dspark.stages
        return replace(super()._of_stages(), ratios=(0,) * layers, sources=(-1,) * layers)

    @property
    def streams(self) -> AheadSizes:
        reads = any(source >= 0 for source in self.sources)
        shared = self.head_dim + self.index_head_dim + self.index_topk + 1 if reads else 0
        numbers = (self.hc_mult, self.hidden_size, self.hc_sinkhorn_iters)
        return AheadSizes(*numbers, self.hc_eps, self.rms_norm_eps, _STREAMS, shared=shared)

    @property
    def cache(self) -> CompressedCache:
        return replace(super().cache, keyed=True)

    @property
    def entry_rates(self) -> tuple[tuple[int, bool], ...]:
        """For each layer: tokens per entry of its own, 0 without, and whether it has index keys."""
        return tuple(
            (ratio, True) if source == layer else (0, False)
            for layer, (ratio, source) in enumerate(zip(self.ratios, self.sources))
        )

    def reads_entries(self, layer: int) -> bool:
        return self.sources[layer] >= 0

    @property
    def max_independent_tokens(self) -> int | None:
        """Candidates are not passed from layer to layer: of as many entries all are."""
        if self.candidate_source < 0:
            return None
        rate = self.ratios[self.candidate_source]
        return rate * self.candidate_topk_blocks * self.candidate_block_size

    def check_tokenizer(self, path: Path) -> None:
        if self.engram is not None:
            self.engram.check(token_classes(path))

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        return _COPIED


def _layer_ids(text: JsonObject, name: str, num_layers: int) -> tuple[int, ...]:
    listed = [] if text.get(name) is None else text[name]
    known = isinstance(listed, list | tuple) and all(
        type(one) is int and 0 <= one < num_layers for one in listed
    )
    if not known or sorted({*listed}) != [*listed]:
        raise refusal(name, listed, f"rising numbers of layers below {num_layers}")
    return tuple(listed)


def _read_schedule(
    text: JsonObject, num_layers: int
) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
    """ratios, sources and selecting of `Config`."""
    listed = text.get("compress_ratios")
    if (
        not isinstance(listed, list | tuple)
        or len(listed) < num_layers
        or not all(type(one) is int and 0 <= one <= 2 for one in listed)
    ):
        wanted = f"{_RATIOS} for each of num_hidden_layers = {num_layers}"
        raise refusal("compress_ratios", listed, wanted)
    if any(listed[num_layers:]):
        raise refusal("compress_ratios", listed, "0 for the layers of the DSpark head")
    ratios = tuple(listed[:num_layers])
    made = _layer_ids(text, "kv_source_layer_ids", num_layers)
    selecting = _layer_ids(text, "index_source_layer_ids", num_layers)
    sources, last = list[int](), -1
    for layer, ratio in enumerate(ratios):
        last = layer if layer in made else last
        before = [one for one in selecting if one <= layer]
        if ratio and (last < 0 or ratios[last] != ratio):
            raise refusal(
                "kv_source_layer_ids", [*made], f"a layer at {layer} or before with its ratio"
            )
        if ratio and (not before or (before[-1] < last)):
            raise refusal(
                "index_source_layer_ids", [*selecting], f"layer {last}, whose entries are read"
            )
        sources.append(last if ratio else -1)
    for name, layers in (("kv_source_layer_ids", made), ("index_source_layer_ids", selecting)):
        if any(not ratios[one] for one in layers):
            raise refusal(name, [*layers], "layers with a ratio in compress_ratios")
    return ratios, tuple(sources), frozenset(selecting)


def _read_candidate_source(
    text: JsonObject, config: Config, sources: tuple[int, ...], selecting: frozenset[int]
) -> int:
    name = "candidate_source_layer_id"
    found = -1 if text.get(name) is None else check_count(name, text[name], least=-1)
    if found < 0:
        return -1
    after = {sources[layer] for layer in selecting if layer >= found}
    if found not in selecting or after != {found}:
        raise refusal(name, found, "a layer of both lists, whose entries are the last ones")
    for one in ("candidate_topk_blocks", "candidate_block_size"):
        check_count(one, getattr(config, one))
    room = config.candidate_topk_blocks * config.candidate_block_size
    check_at_most("index_topk", config.index_topk, "entries of candidate_topk_blocks", room)
    return found
