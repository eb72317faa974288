"""What a draft model brings on this machine: acceptance, and tokens a second beside those without.

    python benchmarks/draft_models.py [--target MODEL --draft MODEL] [--users 1,8] [--tokens 192] [--device cpu]

Without models: random ones of Qwen3's kind, of 8 layers of 768 and as draft the first of them. How much the other seven change what the
first one says is chosen (--change), so that guesses are right more or less often; nobody talks like that, and times are real.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantkit.executor.engine import Engine
from quantkit.executor.sampling import SamplingParams
from quantkit.hub import find_model
from quantkit.models import find_architecture

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}


def write_pair(folder: Path, change: float) -> tuple[Path, Path]:
    """A target and a draft model with tiny-r1's tokens. change: by what later layers' outputs are multiplied."""
    tokenizer = find_model("tiny-r1")
    for name, layers in (("target", 8), ("draft", 1)):
        config = CONFIG | {"num_hidden_layers": layers, "vocab_size": json.loads((tokenizer / "config.json").read_text())["vocab_size"]}
        architecture, tensors, generator = find_architecture(config), {}, torch.Generator()
        for row in architecture.parameters(architecture.Config.from_dict(config)):
            generator.manual_seed(len(row.name) * 1000 + sum(row.name.encode()))
            noise = torch.randn(row.shape, generator=generator)
            scale = change if row.layer and row.name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            tensors[row.name] = (1 + 0.1 * noise if row.role == "norm" else noise * 2 * scale / math.sqrt(row.shape[-1])).bfloat16()
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name / file).write_bytes((tokenizer / file).read_bytes())
    return folder / "target", folder / "draft"


def measure(target: Path, users: int, tokens: int, **options: Any) -> dict[str, float]:
    """After a run that warms up: tokens a second of all users together, by the clock and by the time of the process."""
    engine = Engine.load(target, max_batch=users, max_model_len=tokens + 64, **options)
    prompts = [[20 + (7 * i + place) % 90 for place in range(16)] for i in range(users)]
    params = [SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=i) for i in range(users)]
    list(engine.generate(prompts, params))
    acceptance = engine.speculation.acceptance
    before = acceptance.drafted, acceptance.accepted
    began, cpu = time.perf_counter(), time.process_time()
    list(engine.generate(prompts, params))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    drafted, kept = acceptance.drafted - before[0], acceptance.accepted - before[1]
    return {"tokens_s": users * tokens / seconds, "tokens_cpu_s": users * tokens / cpu, "kept": kept / max(drafted, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--users", default="1,8")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--change", default="0.02,0.1,1")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for change in ("",) if options.target else options.change.split(","):
            if options.target:
                target, draft = find_model(options.target), find_model(options.draft)
            else:
                (own := Path(folder) / change).mkdir()
                target, draft = write_pair(own, float(change))
            for users in map(int, options.users.split(",")):
                plain = measure(target, users, options.tokens, device=options.device)
                for kind, measured in (("four", False), ("chosen", True)):
                    given = {"draft": draft, "measure_steps": measured, "device": options.device}
                    found = measure(target, users, options.tokens, **given)
                    ratios = {f"{key}_ratio": round(found[key] / plain[key], 2) for key in ("tokens_s", "tokens_cpu_s")}
                    row = {"change": change, "users": users, "guesses": kind, "tokens_s": round(found["tokens_s"], 1)}
                    print(row | ratios | {"kept": round(found["kept"], 3)}, flush=True)


if __name__ == "__main__":
    main()
