"""What guesses of a head of EAGLE-3 that are never right cost: tokens of one or more users beside
an engine without a head, on one device.

    python benchmarks/head_cost.py [--users 1,8] [--output-len 192] [--rounds 4] [--bits 16] [--out
    FILE.json]
    python benchmarks/head_cost.py --tiny            the same on a CPU in seconds: a test of the script

Shapes of Qwen3-8B, weights made up on the device, so that nothing that the head says is what the
model chooses. Engines as a server has
them: how many tokens are guessed is chosen while running, and they live on from round to round.
Without a head, with one whose guesses are chosen, and with three guesses a step, in turns;
milliseconds a token of each round.
"""

import argparse
import statistics
from typing import Any

import torch
from command import measured, numbers, parser
from grouped_model import MODELS, GroupedBench
from made_engine import made_model
from r1_synthetic import SyntheticWeights

from quantkit.checkpoint.hub import find_model
from quantkit.evaluation.speed.engine import EngineTarget
from quantkit.evaluation.speed.measure import Workload
from quantkit.executor.cache.cache import BLOCK_SIZE, CachePlan
from quantkit.executor.engine import Engine
from quantkit.executor.memory_budget import default_step_tokens
from quantkit.executor.options import EngineOptions
from quantkit.executor.speculation.eagle_head import LoadedEagleHead
from quantkit.executor.weights.load import LoadedModel
from quantkit.models.eagle3 import Eagle3Head, HeadConfig, parameters
from quantkit.tokenizer.chat import ChatTokenizer

GUESSES = 3


def made_head(loaded: LoadedModel, fields: dict[str, Any], bits: int) -> LoadedEagleHead:
    """Of the model's own sizes; the model hands out what it reads from now on."""
    config = HeadConfig.from_dict(
        fields
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
        }
    )
    weights = SyntheticWeights(config.decoder, 1, loaded.device, parameters(config), bits)
    vocab = loaded.config.vocab_size
    head = Eagle3Head(
        config, weights, loaded.model.embedding, torch.arange(vocab, device=loaded.device), vocab
    )
    loaded.model.aux_layers = config.aux_layers(loaded.config.num_hidden_layers)
    return LoadedEagleHead(head, config, loaded.dtype, loaded.device, 0)


def made(
    loaded: LoadedModel,
    head: LoadedEagleHead | None,
    users: int,
    length: int,
    *,
    chosen: bool = True,
) -> Engine:
    plan = CachePlan(users * (-(-(length + 2 * GUESSES) // BLOCK_SIZE) + 1) + 1, BLOCK_SIZE, length)
    options = EngineOptions(
        max_batch=users,
        chunk_tokens=default_step_tokens(loaded.device),
        draft_length=GUESSES if head else 0,
        measure_steps=chosen,
    )
    return Engine(loaded, ChatTokenizer(find_model("tiny-r1")), plan, options, head)


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cpu" if options.tiny else "cuda")
    model, fields = "qwen3-8b", MODELS["qwen3-8b"][1]
    if options.tiny:
        fields = fields | {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        }
        MODELS[model] = (MODELS[model][0], fields | {"num_hidden_layers": 8, "vocab_size": 512})
        fields = MODELS[model][1]
    bench = GroupedBench(model, 0, device, bits=options.bits)
    plain = made_model(bench.model, bench.config, bench.weights, device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if not options.tiny else "cpu",
        "bits": options.bits,
        "rows": [],
    }
    length = options.input_len + options.output_len
    for users in options.users:
        bench.model.aux_layers = ()
        engines = {"none": made(plain, None, users, length)}
        work = Workload(options.input_len, options.output_len, users, users, seed=users)
        times: dict[str, list[float]] = {"none": [], "chosen": [], "three": []}
        # Without a head first, for a model that is read by one hands out more: its graphs are kept
        # as they were captured.
        times["none"] = [_tpot(engines["none"], work) for _ in range(1 + options.rounds)][1:]
        head = made_head(plain, fields, options.bits)
        engines |= {
            name: made(plain, head, users, length, chosen=name == "chosen")
            for name in ("chosen", "three")
        }
        for turn in range(1 + options.rounds):
            for name in ("none", "chosen", "three"):
                if turn or name != "none":
                    times[name].append(_tpot(engines[name], work))
        for name, found in times.items():
            row = {
                "users": users,
                "guesses": name,
                "first_ms": found[0],
                "median_ms": statistics.median(found[1:]),
                "all_ms": found,
            }
            report["rows"].append(row)
            print(
                "  ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in row.items()
                ),
                flush=True,
            )
        ratio = statistics.median(times["chosen"][1:]) / statistics.median(times["none"])
        print(f"{users} users: chosen / none {ratio:.4f}", flush=True)
    return report


def _tpot(engine: Engine, work: Workload) -> float:
    return statistics.mean(
        one.tpot_ms or 0.0 for one in EngineTarget(engine, "head", work.concurrency).run(work)
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--users", type=numbers, default=[1, 8])
    options.add_argument("--input-len", type=int, default=200)
    options.add_argument("--output-len", type=int, default=192)
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--bits", type=int, choices=(4, 16), default=16)
    options.add_argument("--tiny", action="store_true")
    measured(run, options)


if __name__ == "__main__":
    main()
