"""DeepSeek-V4's config.json, as the release and as transformers spell it: layer schedules, rotary
embeddings."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from quantkit_kernels import Gating, Routing

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.models.architecture import CompressedCache, ModelConfig
from quantkit.models.config import (
    DECIDED,
    CountOrNone,
    NumExperts,
    NumLayers,
    NumLayersOrNone,
    check_at_most,
    check_count,
    check_divides,
    check_number,
    read_fields,
    refusal,
    refuse_other_values,
)
from quantkit.models.dspark import NO_HEAD, DSparkSizes
from quantkit.models.hyper_connections import HyperConnectionSizes
from quantkit.models.mlp import MixtureNames, MlpNames
from quantkit.models.rope import Rope

WINDOW = "sliding_attention"
COMPRESSED = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
_BY_RATIO = {0: WINDOW, 4: COMPRESSED, 128: HEAVY}
"""The release lists tokens per compressed KV entry."""
_HASHED, _ROUTED = "hash_moe", "moe"
_HASH_LAYERS, _THETAS, _ROTARY_SHARE = 3, (10000.0, 160000.0), 64 / 512
"""transformers' defaults."""
_RATES = {COMPRESSED: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
_LINEARS = MlpNames("w1", "w3", "w2")
SCORINGS = ("sqrtsoftplus", "sigmoid")
COMPUTED: JsonObject = {
    "hidden_act": "silu",
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}


def check_scoring(config: JsonObject) -> None:
    """Raise QuantkitError for a scoring_func that is not computed."""
    if config.get("scoring_func") is not None and config["scoring_func"] not in SCORINGS:
        raise refusal("scoring_func", config["scoring_func"], " or ".join(SCORINGS))


def check_sizes(config: Any) -> None:
    """Raise QuantkitError where sizes do not fit together."""
    check_divides("o_groups", "num_attention_heads", config)
    check_at_most(
        "num_experts_per_tok",
        config.num_experts_per_tok,
        "n_routed_experts",
        config.n_routed_experts,
    )
    rotary = max(rope.dim for rope in config.ropes)
    check_at_most("the rotary embedding's channels", rotary, "head_dim", config.head_dim)
    if COMPRESSED in config.kinds:
        check_at_most(
            "the rotary embedding's channels",
            config.ropes[1].dim,
            "index_head_dim",
            config.index_head_dim,
        )


def read_schedules(
    config: JsonObject, num_layers: int, drafts: int
) -> tuple[tuple[str, ...], tuple[int, int], frozenset[int]]:
    """Kinds of attention by layer, tokens per compressed KV entry of the two kinds that have them,
    and layers with hash routing.

    drafts: number of MTP layers, which come last. Those beyond the end of the lists only have a
    window, as in the release.
    """
    kinds = config.get("layer_types")
    if kinds is None and config.get("compress_ratios") is not None:
        ratios = config["compress_ratios"]
        known = isinstance(ratios, list) and all(
            type(one) is int and one in _BY_RATIO for one in ratios
        )
        if not known or len(ratios) < num_layers:
            raise refusal(
                "compress_ratios",
                ratios,
                f"{', '.join(map(str, _BY_RATIO))} for each of num_hidden_layers = {num_layers}",
            )
        kinds = [_BY_RATIO[one] for one in ratios]
    if kinds is None:
        kinds = [
            HEAVY if layer < 2 or layer % 2 == 0 else COMPRESSED for layer in range(num_layers)
        ]
    kinds = (
        [*kinds, *[WINDOW] * (num_layers + drafts - len(kinds))]
        if isinstance(kinds, list) and len(kinds) >= num_layers
        else kinds
    )
    found = _check_kinds("layer_types", kinds, num_layers, (WINDOW, COMPRESSED, HEAVY), drafts)
    experts = config.get("mlp_layer_types")
    if experts is None:
        count = check_count(
            "num_hash_layers", _or(config.get("num_hash_layers"), _HASH_LAYERS), least=0
        )
        experts = [_HASHED if layer < count else _ROUTED for layer in range(num_layers)]
    listed = _check_kinds("mlp_layer_types", experts, num_layers, (_HASHED, _ROUTED))
    return (
        found,
        _read_rates(config),
        frozenset(layer for layer, kind in enumerate(listed) if kind == _HASHED),
    )


def _check_kinds(
    name: str, kinds: Any, num_layers: int, known: tuple[str, ...], drafts: int = 0
) -> tuple[str, ...]:
    if not isinstance(kinds, list) or len(kinds) < num_layers or not {*map(str, kinds)} <= {*known}:
        raise refusal(
            name, kinds, f"{' or '.join(known)} for each of num_hidden_layers = {num_layers}"
        )
    return tuple(kinds[: num_layers + drafts])


def _read_rates(config: JsonObject) -> tuple[int, int]:
    given = config.get("compress_rates")
    if given is not None and (not isinstance(given, dict) or {*given} != {*_RATES}):
        raise refusal("compress_rates", given, f"a number of tokens for {' and '.join(_RATES)}")
    rates = given or {kind: default for kind, (_, default) in _RATES.items()}
    first, second = (
        check_count(
            "compress_rates" if config.get(own) is None else own, _or(config.get(own), rates[kind])
        )
        for kind, (own, _) in _RATES.items()
    )
    return first, second


def read_ropes(config: JsonObject, head_dim: int) -> tuple[Rope, Rope]:
    """Of layers with a window only, and of those with compressed KV, whose indexers and entries use
    the second one."""
    named = next((name for name in ("rope_scaling", "rope_parameters") if config.get(name)), None)
    given = config[named] if named else {}
    if not isinstance(given, dict):
        raise refusal(str(named), given, "an object")
    share = config.get("partial_rotary_factor")
    if share is None:
        dim = config.get("qk_rope_head_dim")
        share = (
            _ROTARY_SHARE
            if dim is None
            else check_count("qk_rope_head_dim", dim, most=head_dim) / head_dim
        )
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        sides = [dict(given["main"]), dict(given["compress"])]
        shares = [side.pop("partial_rotary_factor", None) for side in sides]
        if None in shares:
            raise QuantkitError(
                "config.json has rope_parameters without partial_rotary_factor in main or compress",
                "add the model's own",
            )
    else:
        scaling = {
            key: value
            for key, value in given.items()
            if key not in ("rope_theta", "partial_rotary_factor", "main", "compress")
        }
        if scaling.get("rope_type", scaling.get("type")) == "yarn":
            scaling.setdefault("attention_factor", 1.0)
        thetas = [
            _or(config.get(name), own)
            for name, own in zip(("rope_theta", "compress_rope_theta"), _THETAS)
        ]
        sides = [{"rope_theta": thetas[0]}, {**scaling, "rope_theta": thetas[1]}]
        shares = [share, share]
    kept: JsonObject = {
        key: config[key]
        for key in ("max_position_embeddings", "original_max_position_embeddings")
        if key in config
    }
    first, second = (
        _rope({**kept, "rope_parameters": side}, head_dim, share)
        for side, share in zip(sides, shares)
    )
    return first, second


def _rope(config: JsonObject, head_dim: int, share: Any) -> Rope:
    return Rope.from_dict(
        config, int(head_dim * check_number("partial_rotary_factor", share)), True, None
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


@dataclass(frozen=True)
class Config(ModelConfig):
    """Fields as config.json names them. kinds: of attention, by layer, MTP layers included; rates:
    tokens per compressed KV entry, by kind; hashed: layers with hash routing; ropes: of layers with
    a window only, and of the others."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: NumLayers
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    n_routed_experts: NumExperts
    num_experts_per_tok: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rms_norm_eps: float
    max_position_embeddings: int
    num_nextn_predict_layers: NumLayersOrNone = 0
    hc_mult: int = 4
    hc_sinkhorn_iters: CountOrNone = 20
    hc_eps: float = 1e-6
    swiglu_limit: float = 10.0
    routed_scaling_factor: float = 1.5
    scoring_func: str = "sqrtsoftplus"
    kinds: Annotated[tuple[str, ...], DECIDED] = ()
    rates: Annotated[tuple[int, int], DECIDED] = (4, 128)
    hashed: Annotated[frozenset[int], DECIDED] = frozenset()
    ropes: Annotated[tuple[Rope, Rope], DECIDED] = ()  # type: ignore[assignment]
    dspark: Annotated[DSparkSizes, DECIDED] = NO_HEAD

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed by this file."""
        refuse_other_values(config, COMPUTED, "DeepSeek-V4", allow_null=True)
        check_scoring(config)
        made = cls(**read_fields(cls, config))
        kinds, rates, hashed = read_schedules(
            config, made.num_hidden_layers, made.num_nextn_predict_layers
        )
        made = replace(
            made, kinds=kinds, rates=rates, hashed=hashed, ropes=read_ropes(config, made.head_dim)
        )
        check_sizes(made)
        return replace(made, dspark=made.read_dspark(config))

    def read_dspark(self, config: JsonObject) -> DSparkSizes:
        """Of the head in mtp.*, if there is one (models/dspark.py)."""
        return DSparkSizes.from_dict(
            config, self.num_hidden_layers, self.n_routed_experts, self.num_experts_per_tok
        )

    def of_layer(self, layer: int) -> Self:
        """What a layer is built by: stages of the DSpark head have sizes of their own."""
        return self._of_stages() if self.dspark.block and layer >= self.num_hidden_layers else self

    def _of_stages(self) -> Self:
        sizes, kinds = self.dspark, (WINDOW,) * (self.num_hidden_layers + self.dspark.stages)
        own = replace(self, kinds=kinds, n_routed_experts=sizes.experts)
        return replace(own, num_experts_per_tok=sizes.experts_per_token)

    @property
    def streams(self) -> HyperConnectionSizes:
        return HyperConnectionSizes(
            self.hc_mult, self.hidden_size, self.hc_sinkhorn_iters, self.hc_eps, self.rms_norm_eps
        )

    @property
    def cache(self) -> CompressedCache:
        return CompressedCache(
            self.head_dim,
            self.index_head_dim,
            self.sliding_window,
            self.entry_rates[: self.num_hidden_layers],
        )

    @property
    def entry_rates(self) -> tuple[tuple[int, bool], ...]:
        """For each layer: tokens per compressed KV entry, 0 without, and whether an indexer selects
        among the entries."""
        by_kind = {COMPRESSED: (self.rates[0], True), HEAVY: (self.rates[1], False)}
        return tuple(by_kind.get(kind, (0, False)) for kind in self.kinds)

    def reads_entries(self, layer: int) -> bool:
        return bool(self.entry_rates[layer][0])

    @property
    def gating(self) -> Gating:
        return Gating(limit=self.swiglu_limit)

    @property
    def mixture(self) -> MixtureNames:
        return MixtureNames(
            bias="gate.bias", shared="shared_experts", linears=_LINEARS, gating=self.gating
        )

    @property
    def drafted_block(self) -> int:
        return self.dspark.block

    @property
    def has_sequence_state(self) -> bool:
        return True

    @property
    def tp_units(self) -> dict[str, int]:
        return {"num_attention_heads": self.num_attention_heads, "o_groups": self.o_groups}

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        return ("mtp.",)

    @property
    def routing(self) -> Routing:
        scale = self.routed_scaling_factor
        return Routing(
            self.n_routed_experts,
            self.num_experts_per_tok,
            True,
            self.scoring_func,
            routed_scaling_factor=scale,
        )

    def prefix(self, layer: int) -> str:
        """Prefix of the names of a layer's tensors."""
        return (
            f"layers.{layer}"
            if layer < self.num_hidden_layers
            else f"mtp.{layer - self.num_hidden_layers}"
        )

    def is_moe(self, layer: int) -> bool:
        return True

    def names_of(self, layer: int) -> MixtureNames:
        """Names of the layer's experts; hash routing has no bias."""
        return replace(self.mixture, bias=None) if layer in self.hashed else self.mixture
