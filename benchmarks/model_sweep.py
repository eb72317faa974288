"""What quantkit does with every causal model class of the installed transformers: computed by a file
of its own, calibrated through transformers' modules, only rounded to nearest, or refused, and why.

    python benchmarks/model_sweep.py [MODEL_TYPE ...] > sweep.jsonl   # a line a model, counts last

Models are tiny; where a class does not take these sizes, its own with few layers and experts.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from core import parser

from quantkit.common.errors import QuantkitError
from quantkit.models import is_known
from quantkit.models.hf_traced.architecture import TracedArchitecture
from quantkit.models.hf_traced.module_tree import read_tree

TINY = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
FEW = (
    {"num_hidden_layers": 4}
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k"), 2
    )
    | dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1)
)
"""Counts of a tiny model, where its config has the field."""
MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": MLA | EXPERTS,
    "dots1": EXPERTS,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4": {"hidden_size_per_layer_input": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": MLA | {"num_layers": 2, "num_hidden_layers": 4},
    "ministral": {"head_dim": 16},
    "qwen4_exp_text": {
        "head_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
}
"""Fields without which transformers builds no tiny model of the type, and of Gemma 4 those without
embeddings for every layer."""


def configs(model_type: str) -> Iterator[dict[str, Any]]:
    """config.json of a tiny model, then of a short one."""
    import transformers

    default = transformers.AutoConfig.for_model(model_type)
    text = default.get_text_config()
    few = {key: value for key, value in FEW.items() if getattr(text, key, None) is not None}
    layers = {"num_hidden_layers": few["num_hidden_layers"]} if "num_hidden_layers" in few else {}
    for own in (TINY | few, few, layers):
        own = own | OWN.get(model_type, {})
        if text is default:
            yield {**own, "model_type": model_type}
        else:
            key = next(key for key in default.sub_configs if getattr(default, key, None) is text)
            yield {"model_type": model_type, key: {**own, "model_type": text.model_type}}


def fate(model_type: str) -> tuple[str, str]:
    """What is done with a model, and why no more."""
    if is_known({"model_type": model_type}):
        return "file", ""
    reasons = []
    try:
        for config in configs(model_type):
            try:
                TracedArchitecture(config)
                return "calibrated", ""
            except QuantkitError as fault:
                reasons.append((fault.problem.partition(": ")[2] or fault.problem, config))
    except Exception as fault:
        return "refused", f"transformers builds no default config ({fault!s:.80})"
    reasons.sort(key=lambda one: "does not build it" in one[0])
    for reason, config in reasons:
        if read_tree(config).linears:
            return "rounded", reason
    return "refused", reasons[0][0]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("models", nargs="*", metavar="MODEL_TYPE", help="all by default")
    names = options.parse_args().models

    import transformers
    from transformers.models.auto import modeling_auto

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = names or sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    counts = Counter[str]()
    for name in names:
        what, why = fate(name)
        counts[what] += 1
        print(json.dumps({"model_type": name, "fate": what, "reason": why}), flush=True)
    print(json.dumps({"transformers": transformers.__version__, "models": len(names), **counts}))


if __name__ == "__main__":
    main()
