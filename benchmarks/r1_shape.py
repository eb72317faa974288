"""Quantize layers with DeepSeek-R1's true dimensions, or those of other models, and say how long
one takes and how much memory.

    python benchmarks/r1_shape.py write DIR [--shape r1|deepseek-v32|kimi-k2|qwen3-8b|smollm2]
    [--experts 256] [--layers 2] [--dense 1] [--chosen 8]
    python benchmarks/r1_shape.py run DIR [--recipe awq-w4a16] [--device cpu] [--samples 128]
    [--held-out N] [--memory 16GiB] [--profile]
    torchrun --nproc-per-node 4 benchmarks/r1_shape.py run DIR --device cuda             on several cards; seconds are those of rank 0

`write` makes a checkpoint in R1's FP8 layout: hidden 7168, 128 heads, experts of 2048, vocabulary
129280, cut to one dense layer and
--layers - 1 MoE layers (12.8 GB with all 256 experts), or with --layers 1 to one MoE layer. Weights
are Gaussian, of R1's size, with scales that differ from block to block; norm gains have a few large
channels, so activations have outliers as a trained model's do. One pool of random codes is cut at
another place for every tensor: drawing 12 billion of them would take longer than quantizing. Fewer
experts make the same layer with less of it; 32 of which a token chooses 1 have as many tokens each
as R1's. qwen3-8b and smollm2 are dense models in BF16.

`run` quantizes it and prints one JSON object: seconds by phase, peak memory as the operating system
counts it, and the plan's figure. Calibration text is random words, one token each, frequent ones
more often (Zipf).
"""

import json
import math
import os
import resource
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from core import about, parser, print_about
from made_weights import QWEN3_8B
from torch import Tensor

from quantkit.calibrate.recipe import load_recipe
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.common.progress import Event, Progress, peak_memory
from quantkit.common.sizes import parse_bytes
from quantkit.grids.schemes import find_scheme
from quantkit.models import find_architecture
from quantkit.models.table import Parameter
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization import quantize

POOL = 2**26
BLOCK = 128


SHAPES: dict[str, dict[str, Any]] = {
    "r1": {},
    "deepseek-v32": {
        "model_type": "deepseek_v32",
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
    "kimi-k2": {
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 131072,
        "rope_theta": 50000,
    },
}
"""What differs from R1."""
DENSE: dict[str, dict[str, Any]] = {
    "qwen3-8b": QWEN3_8B | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "smollm2": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""Configs of dense models."""


def shape_config(
    shape: str, experts: int, layers: int, dense: int = 1, chosen: int = 8
) -> dict[str, Any]:
    """A published config.json with fewer layers and, if wanted, fewer experts and fewer chosen.
    dense: layers without experts, but that one layer has them."""
    if shape in DENSE:
        return DENSE[shape] | {"num_hidden_layers": layers, "hidden_act": "silu"}
    made = r1_config(experts, layers) | SHAPES[shape]
    groups = {"n_group": 1, "topk_group": 1} if experts < 16 else {}
    return (
        made
        | groups
        | {
            "first_k_dense_replace": min(layers - 1, dense),
            "num_experts_per_tok": min(experts, chosen),
        }
    )


def r1_config(experts: int, layers: int) -> dict[str, Any]:
    """R1's."""
    yarn = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    }


def is_fp8(row: Parameter) -> bool:
    return row.role in ("linear", "kv_b", "indexer")


def specs(rows: list[Parameter], packed: bool) -> Iterator[TensorSpec]:
    """packed: linears in FP8."""
    for row in rows:
        if packed and is_fp8(row):
            yield TensorSpec(row.name, torch.float8_e4m3fn, row.shape)
            yield TensorSpec(
                f"{row.name}_scale_inv",
                torch.float32,
                tuple(math.ceil(size / BLOCK) for size in row.shape),
            )
        else:
            yield TensorSpec(
                row.name, torch.float32 if row.role == "router_bias" else torch.bfloat16, row.shape
            )


class Values:
    """Random tensors cut from two pools. packed: linears in FP8."""

    def __init__(self, packed: bool) -> None:
        self.packed = packed
        self.generator = torch.Generator().manual_seed(0)
        noise = torch.randn(POOL, generator=self.generator)
        self.plain = noise.bfloat16()
        self.codes = (
            (noise * (448 / 4.2)).clamp(-448, 448).to(torch.float8_e4m3fn)
        )  # the largest of a block's 16384 is near 4.2 sigma

    def tensors(self, row: Parameter) -> dict[str, Tensor]:
        if row.role == "norm":
            gain = (0.3 * self.randn(row.shape)).exp() * (0.05 if "layernorm" in row.name else 1.0)
            gain[torch.randperm(len(gain), generator=self.generator)[: len(gain) // 500]] *= 8
            return {row.name: gain.bfloat16()}
        if row.role in ("router_bias", "bias"):
            return {row.name: 0.01 * self.randn(row.shape)}
        spread = 1 / math.sqrt(row.shape[1])
        if not (self.packed and is_fp8(row)):
            return {
                row.name: self.cut(self.plain, row.shape)
                * (1.0 if row.role == "embedding" else spread)
            }
        blocks = [math.ceil(size / BLOCK) for size in row.shape]
        scale = (0.15 * self.randn(blocks)).exp() * spread * 4.2 / 448
        return {row.name: self.cut(self.codes, row.shape), f"{row.name}_scale_inv": scale}

    def randn(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def cut(self, pool: Tensor, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        start = int(torch.randint(POOL // 2, (1,), generator=self.generator))
        flat = pool[start:]
        return (
            flat[:count]
            if count <= len(flat)
            else flat.repeat(math.ceil(count / len(flat)))[:count]
        ).view(shape)


def write(path: Path, config: dict[str, Any]) -> None:
    architecture = find_architecture(config)
    rows = architecture.parameters(architecture.Config.from_dict(config))
    packed, start = "quantization_config" in config, time.perf_counter()
    values, layout = Values(packed), list(specs(rows, packed))
    with CheckpointWriter(path, layout, fingerprint={}, overwrite=True) as writer:
        for row in rows:
            if not writer.is_done(row.name):
                writer.write(row.name, values.tensors(row))
        writer.finish(config, {"tokenizer.json": _tokenizer(config["vocab_size"])})
        written = writer.layout.total_size
    _text(path / "calibration.jsonl", config["vocab_size"])
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "path": str(path),
                "bytes": written,
                "seconds": round(seconds, 1),
                "gb_per_second": round(written / seconds / 1e9, 2),
            }
        )
    )


def _tokenizer(vocabulary: int) -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(tokenizer.to_str()).encode()


def _text(path: Path, vocabulary: int) -> None:
    weights = 1 / torch.arange(10, vocabulary + 10).double()
    words = torch.multinomial(
        weights, 160 * 520, replacement=True, generator=torch.Generator().manual_seed(0)
    ).view(160, 520)
    path.write_text(
        "".join(
            json.dumps({"text": " ".join(f"w{i}" for i in record)}) + "\n"
            for record in words.tolist()
        )
    )


class Phases:
    """Seconds of every phase, and of the processors in it, by half or experts of each layer; each
    event begins one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self._last, self._since, self._begun = "start", time.perf_counter(), time.perf_counter()
        self._cpu_since = time.process_time()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            now = time.perf_counter()
            cpu = time.process_time()
            self.seconds[self._last] += now - self._since
            self.cpu[self._last] += cpu - self._cpu_since
            unit = event.unit.split(".experts")[0] + (
                " experts" if ".experts" in event.unit else ""
            )
            phase = f"{unit}: {event.phase}" if event.unit.startswith("layers") else "tables"
            if phase != self._last and "experts" not in phase:
                self._tell(f"{now_held_and_peak(event)}  {phase}", now, cpu)
            if layer_of(phase) != layer_of(self._last) and layer_of(self._last).startswith(
                "layers"
            ):
                own = {
                    name: round(seconds, 2)
                    for name, seconds in self.seconds.items()
                    if layer_of(name) == layer_of(self._last)
                }
                self._tell(
                    f"{layer_of(self._last)} took {sum(own.values()):.2f} s: {json.dumps(own)}",
                    now,
                    cpu,
                )
            self._last, self._since, self._cpu_since = phase, now, cpu

    def _tell(self, text: str, now: float, cpu: float) -> None:
        print(f"{now - self._begun:7.1f} s, CPU {cpu:7.1f} s  {text}", file=sys.stderr, flush=True)


def now_held_and_peak(event: Progress) -> str:
    return f"{event.memory / 2**30:6.2f} GiB, peak {peak_memory() / 2**30:6.2f}"


def layer_of(phase: str) -> str:
    """layers.3 of layers.3.attend: solving; of what is in no layer, its own name."""
    return ".".join(phase.split(":")[0].split(" ")[0].split(".")[:2])


def run(
    path: Path,
    name: str,
    device: str,
    samples: int,
    held_out: int | None,
    seq_len: int,
    memory: str | None,
    profile: bool,
) -> None:
    """name: of a recipe. held_out: None for the recipe's own."""
    out, leads = path.with_name(f"{path.name}-{name}"), os.environ.get("RANK", "0") == "0"
    if leads:
        for left in (
            out,
            out.with_name(f"{out.name}.partial"),
        ):  # what a run that was ended left would be gone on with
            shutil.rmtree(left, ignore_errors=True)
    settings = {
        "calibration": str(path / "calibration.jsonl"),
        "samples": samples,
        "seq_len": seq_len,
    } | ({} if held_out is None else {"held_out": held_out})
    recipe = load_recipe(name).model_copy(update=settings)
    scheme = find_scheme(recipe.scheme)
    planned = plan(path, scheme, PlanOptions(recipe=recipe, samples=samples, seq_len=seq_len))
    phases = Phases()
    if leads:
        print_about(about(device.partition(":")[0]))
    ceiling = parse_bytes(memory) if memory else None
    before = resource.getrusage(resource.RUSAGE_SELF)
    with _profiled(profile):
        report = quantize(
            path, out, scheme, "auto", recipe, device=device, memory=ceiling, on_event=phases
        )
    after = resource.getrusage(resource.RUSAGE_SELF)
    if not leads:
        return
    layers: dict[str, float] = defaultdict(float)
    for phase, seconds in phases.seconds.items():
        layers[layer_of(phase)] += seconds
    print(
        json.dumps(
            {
                "seconds": round(report.seconds, 1),
                "cpu_seconds": round(
                    after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
                ),
                "threads": torch.get_num_threads(),
                "cores": os.cpu_count(),
                "peak_rss_gib": round(report.peak_memory / 2**30, 2),
                "planned_gib": round(planned.host_peak_bytes / 2**30, 2),
                "planned": asdict(planned.host_peak),
                "device_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)
                if torch.cuda.is_available()
                else None,
                "tokens": report.calibration_tokens,
                "mean_error": report.findings.mean_error,
                "by_layer": {name: round(seconds, 1) for name, seconds in layers.items()},
                "cpu_by_phase": {name: round(seconds, 1) for name, seconds in phases.cpu.items()},
                "by_phase": {name: round(seconds, 1) for name, seconds in phases.seconds.items()},
            },
            indent=1,
        )
    )
    shutil.rmtree(out)


class _profiled:
    """Prints where the time went, by operator, of the block it holds."""

    def __init__(self, wanted: bool) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = (
            torch.profiler.profile(activities=activities, acc_events=True) if wanted else None
        )

    def __enter__(self) -> None:
        if self.profiler:
            self.profiler.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self.profiler:
            self.profiler.__exit__(*raised)
            order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            print(
                self.profiler.key_averages().table(
                    sort_by=order, row_limit=25, max_name_column_width=60
                )
            )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("what", choices=("write", "run"))
    options.add_argument("path", type=Path)
    options.add_argument("--shape", choices=[*SHAPES, *DENSE], default="r1")
    options.add_argument("--experts", type=int, default=256)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--dense", type=int, default=1, help="layers without experts")
    options.add_argument("--chosen", type=int, default=8, help="experts that a token chooses")
    options.add_argument("--recipe", default="awq-w4a16")
    options.add_argument("--device", default="cpu")
    options.add_argument("--samples", type=int, default=128)
    options.add_argument("--held-out", type=int, help="default: the recipe's")
    options.add_argument("--seq-len", type=int, default=512)
    options.add_argument("--memory")
    options.add_argument("--profile", action="store_true")
    given = options.parse_args()
    if given.what == "write":
        write(
            given.path,
            shape_config(given.shape, given.experts, given.layers, given.dense, given.chosen),
        )
    else:
        run(
            given.path,
            given.recipe,
            given.device,
            given.samples,
            given.held_out,
            given.seq_len,
            given.memory,
            given.profile,
        )


if __name__ == "__main__":
    main()
