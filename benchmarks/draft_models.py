"""What a draft model brings on this machine: acceptance, and tokens a second next to those of two
engines without, step by step in turns.

    python benchmarks/draft_models.py [--target MODEL --draft MODEL] [--users 1,8] [--tokens 192]
    [--loads 1] [--turns 1] [--device cpu]

Without models: random ones of Qwen3's kind, of 8 layers of 768 and as draft the first of them. How
much the other seven change what the first one says is chosen (--change), so that drafts are right
more or less often; no text is like that, and times are real.
"""

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from core import Report, Spread, measured, numbers, parser, words
from safetensors.torch import save_file

from quantkit.checkpoint.hub import find_model
from quantkit.executor.engine import Engine
from quantkit.executor.sampling.params import SamplingParams
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
    """A target and a draft model with tiny-r1's tokens. change: by what later layers' outputs are
    multiplied."""
    tokenizer = find_model("tiny-r1")
    for name, layers in (("target", 8), ("draft", 1)):
        config = CONFIG | {
            "num_hidden_layers": layers,
            "vocab_size": json.loads((tokenizer / "config.json").read_text())["vocab_size"],
        }
        architecture, tensors, generator = find_architecture(config), {}, torch.Generator()
        for row in architecture.parameters(architecture.Config.from_dict(config)):
            generator.manual_seed(len(row.name) * 1000 + sum(row.name.encode()))
            noise = torch.randn(row.shape, generator=generator)
            scale = (
                change
                if row.layer and row.name.endswith(("o_proj.weight", "down_proj.weight"))
                else 1.0
            )
            tensors[row.name] = (
                1 + 0.1 * noise
                if row.role == "norm"
                else noise * 2 * scale / math.sqrt(row.shape[-1])
            ).bfloat16()
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name / file).write_bytes((tokenizer / file).read_bytes())
    return folder / "target", folder / "draft"


def in_turns(engines: dict[str, Engine], users: int, tokens: int) -> dict[str, dict[str, float]]:
    """The same answers by every engine, whose answers are the shortest computing the next step:
    what else a machine does meets all alike, where whole answers of one engine differed by a third.
    Tokens a second of all users together, by the clock and by the time of the process; of the
    drafts the share that was kept; steps."""
    prompts = [[20 + (7 * i + place) % 90 for place in range(16)] for i in range(users)]
    params = [SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=i) for i in range(users)]
    counts = {name: engine.speculation.acceptance for name, engine in engines.items()}
    before = {name: (count.drafted, count.accepted) for name, count in counts.items()}
    answers = {
        name: [engine.submit(*one) for one in zip(prompts, params)]
        for name, engine in engines.items()
    }
    clock, cpu, steps = (dict.fromkeys(engines, 0.0) for _ in range(3))
    while working := [name for name in engines if engines[name].has_work]:
        name = min(working, key=lambda one: sum(len(answer.generated) for answer in answers[one]))
        began, cpu_began = time.perf_counter(), time.process_time()
        engines[name].step()
        clock[name] += time.perf_counter() - began
        cpu[name] += time.process_time() - cpu_began
        steps[name] += 1
    drafted = {name: count.drafted - before[name][0] for name, count in counts.items()}
    return {
        name: {
            "tokens_s": users * tokens / clock[name],
            "tokens_cpu_s": users * tokens / cpu[name],
            "steps": steps[name],
            "drafted": drafted[name],
            "kept": (counts[name].accepted - before[name][1]) / max(drafted[name], 1),
        }
        for name in engines
    }


def load_engines(
    target: Path, draft: Path, options: argparse.Namespace, users: int
) -> dict[str, Engine]:
    """Two without drafts, and between them what is asked for."""
    given: dict[str, Any] = {
        "max_batch": users,
        "max_model_len": options.tokens + 64,
        "device": options.device,
    }
    guess = {"chosen": {"draft": draft, "measure_steps": True}, "four": {"draft": draft}}
    asked = {
        "none": {},
        **{name: guess[name] for name in options.drafts},
        "none again": {},
    }
    return {name: Engine.load(target, **given, **own) for name, own in asked.items()}


def rows(found: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """Each engine's figures, and its speed over the mean of the two without drafts."""
    for name, one in found.items():
        row: dict[str, Any] = {"drafts": name}
        for key in ("tokens_s", "tokens_cpu_s"):
            plain = (found["none"][key] + found["none again"][key]) / 2
            row |= {key: round(one[key], 1), f"{key}_ratio": round(one[key] / plain, 3)}
        yield row | {
            "steps": int(one["steps"]),
            "drafted": int(one["drafted"]),
            "kept": round(one["kept"], 3),
        }


def run(options: argparse.Namespace) -> Report:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for change in [""] if options.target else options.change:
            if options.target:
                target, draft = find_model(options.target), find_model(options.draft)
            else:
                (own := Path(folder) / change).mkdir()
                target, draft = write_pair(own, float(change))
            for users, load in itertools.product(options.users, range(options.loads)):
                engines = load_engines(target, draft, options, users)
                for turn in range(options.turns):
                    row = {"change": change, "users": users, "load": load, "turn": turn}
                    for own_row in rows(in_turns(engines, users, options.tokens)):
                        found.append(row | own_row)
                        print(found[-1], flush=True)
    for key in dict.fromkeys((row["change"], row["users"], row["drafts"]) for row in found):
        alike = [row for row in found if (row["change"], row["users"], row["drafts"]) == key]
        ratios = Spread.of([row["tokens_cpu_s_ratio"] for row in alike])
        print(f"change {key[0]}, {key[1]} users, drafts {key[2]}: {ratios} of none", flush=True)
    return {"rows": found}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target")
    options.add_argument("--draft")
    options.add_argument("--users", type=numbers, default=[1, 8])
    options.add_argument("--tokens", type=int, default=192)
    options.add_argument("--change", type=words, default=["0.02", "0.1", "1"])
    options.add_argument(
        "--loads",
        type=int,
        default=1,
        help="so often all engines are loaded anew: two of a kind differ by up to 3 %%",
    )
    options.add_argument(
        "--turns",
        type=int,
        default=1,
        help="of the same engines; in the first one draft lengths are tried",
    )
    options.add_argument("--drafts", type=words, default=["chosen", "four"])
    options.add_argument("--device", default="cpu")
    measured(run, options)


if __name__ == "__main__":
    main()
