"""One AutoRound run, in its own environment: python quality_auto_round.py MODEL TOKENS.json RECIPE OUT

MODEL is a BF16 checkpoint, TOKENS a list of lists of token ids of one length. Recipes are w4-ITERATIONS (int4 with zero points in groups of
128) and fp4-ITERATIONS (NVFP4 weights, 16-bit activations). OUT is a BF16 checkpoint of the values that the codes stand for.
"""

import json
import sys
import time
from pathlib import Path

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

GRIDS = {
    "w4": {"bits": 4, "group_size": 128, "sym": False, "data_type": "int"},
    "fp4": {"bits": 4, "group_size": 16, "sym": True, "data_type": "nv_fp", "act_bits": 16},
}


def main() -> None:
    path, tokens, recipe, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3], Path(sys.argv[4])
    start = time.perf_counter()
    grid, iterations = recipe.split("-")
    length = min(map(len, tokens))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    data = [{"input_ids": torch.tensor(one[:length])[None], "attention_mask": torch.ones(1, length, dtype=torch.int64)} for one in tokens]
    kept = {} if getattr(model.config, "model_type", "") != "deepseek_v3" else {"ignore_layers": "kv_b_proj"}
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
        **GRIDS[grid],
        **kept,
    )
    rounding.quantize_and_save(str(out), format="fake")
    folder = next(path.parent for path in out.rglob("config.json"))  # OUT, or one of its own in OUT
    for file in list(folder.iterdir()) if folder != out else ():
        file.rename(out / file.name)
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
