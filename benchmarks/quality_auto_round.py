"""One AutoRound run, in its own environment: python quality_auto_round.py MODEL TOKENS.json RECIPE
OUT

MODEL is a BF16 checkpoint, TOKENS a list of lists of token ids of one length. Recipes are
GRID-ITERATIONS, or GRID-v2-ITERATIONS for the
second version of its method: w4 (int4 with zero points in groups of 128), fp4 (NVFP4 weights,
16-bit activations), int8 (a step a row, activations int8 a token) and w4a8 (int4 in groups of 128,
the same activations). OUT is a BF16 checkpoint of the values that the codes stand for;
OUT/activations.json says how many bits the inputs of its linears have, and which linears are kept.
"""

import json
import sys
import time
from pathlib import Path

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

INT8_TOKENS = {
    "act_bits": 8,
    "act_group_size": -1,
    "act_data_type": "int",
    "act_dynamic": True,
    "act_sym": True,
}
GRIDS = {
    "w4": {"bits": 4, "group_size": 128, "sym": False, "data_type": "int"},
    "fp4": {"bits": 4, "group_size": 16, "sym": True, "data_type": "nv_fp", "act_bits": 16},
    "int8": {"bits": 8, "group_size": -1, "sym": True, "data_type": "int", **INT8_TOKENS},
    "w4a8": {"bits": 4, "group_size": 128, "sym": True, "data_type": "int", **INT8_TOKENS},
}
KEPT = ("lm_head", "kv_b_proj", "mlp.gate")


def main() -> None:
    path, tokens, recipe, out = (
        Path(sys.argv[1]),
        json.loads(Path(sys.argv[2]).read_text()),
        sys.argv[3],
        Path(sys.argv[4]),
    )
    start = time.perf_counter()
    grid, *version, iterations = recipe.split("-")
    length = min(map(len, tokens))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    data = [
        {
            "input_ids": torch.tensor(one[:length])[None],
            "attention_mask": torch.ones(1, length, dtype=torch.int64),
        }
        for one in tokens
    ]
    kept = (
        {}
        if getattr(model.config, "model_type", "") != "deepseek_v3"
        else {"ignore_layers": "kv_b_proj"}
    )
    rounding = AutoRound(
        model,
        tokenizer,
        iters=int(iterations),
        nsamples=len(data),
        seqlen=length,
        dataset=data,
        device_map=device,
        batch_size=8,
        enable_torch_compile=False,
        enable_alg_ext=version == ["v2"],
        **GRIDS[grid],
        **kept,
    )
    rounding.quantize_and_save(str(out), format="fake")
    folder = next(path.parent for path in out.rglob("config.json"))  # OUT, or one of its own in OUT
    for file in list(folder.iterdir()) if folder != out else ():
        file.rename(out / file.name)
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config", None)  # of what was rounded; the values are plain
    (out / "config.json").write_text(json.dumps(config))
    (out / "activations.json").write_text(
        json.dumps({"bits": GRIDS[grid].get("act_bits", 16), "kept": KEPT})
    )
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
