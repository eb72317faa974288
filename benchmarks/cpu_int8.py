"""int8-a8w8c16 beside 4 bits on a CPU: decode steps and prompts of tiny-r1 and of random Qwen3
models, dense, with experts, of odd sizes.

    python benchmarks/cpu_int8.py [--folder DIR] [--models tiny-r1,qwen3-moe] [--users 1,3,8,32]
    [--prompts 64,512] [--threads 1] python benchmarks/cpu_int8.py --linears

Weights are rounded to nearest on both grids: what is computed does not depend on how codes were
chosen. Both engines are in one process and take turns, six steps of one and six of the other, a
prompt of each. Time is the process's own processor time; medians, and the least in brackets.
--folder keeps the models: another checkout's package measures the same with PYTHONPATH. --linears:
one linear, C++ (int8.cpp) beside oneDNN and int4, by rows; the weight stays in a cache. What a
processor with AMX should choose is seen there.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cpu_decode import write_random

SHARED: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
}
DENSE: dict[str, Any] = SHARED | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SIZES: dict[str, tuple[int, ...]] = {
    "qwen3-dense": (16384, 1024, 3072, 6, 16, 8, 128),
    "qwen3-odd": (1000, 640, 1664, 4, 10, 2, 64),
}
FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
MODELS: dict[str, dict[str, Any]] = {
    name: DENSE | dict(zip(FIELDS, sizes)) for name, sizes in SIZES.items()
}
MODELS["qwen3-moe"] = (
    SHARED
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 384,
        "num_experts": 32,
    }
    | {
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    | dict(zip(FIELDS, (16384, 1024, 3072, 4, 16, 4, 128)))
)
SHAPES = ((256, 384), (416, 384), (768, 1024), (3072, 1024), (4096, 4096))
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
BLOCK = 6


def source(name: str, folder: Path) -> Path:
    """The checkpoint of a name: tiny-r1's, or random weights."""
    from quantkit.checkpoint.hub import find_model

    if name not in MODELS:
        return find_model(name)
    path = folder / name
    return path if path.exists() else write_random(path, MODELS[name])


def quantized(name: str, folder: Path) -> list[Path]:
    """Of int4 in groups of 128 and of int8, both rounded to nearest."""
    from quantkit.calibrate.recipe import Recipe
    from quantkit.grids.schemes import SCHEMES
    from quantkit.quantization.run import quantize

    schemes = {"int4": SCHEMES["rtn-w4a16"], "int8": replace(SCHEMES["int8-a8w8c16"], methods=())}
    for label, scheme in schemes.items():
        if not (folder / f"{name}-{label}").exists():
            quantize(
                source(name, folder),
                folder / f"{name}-{label}",
                scheme,
                "auto",
                Recipe(scheme=scheme.name),
                device="cpu",
            )
    return [folder / f"{name}-{label}" for label in schemes]


def seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def asked(count: int, vocab: int, length: int) -> list[list[int]]:
    return torch.randint(
        10, vocab, (count, length), generator=torch.Generator().manual_seed(count)
    ).tolist()


def steps(engines: list[Any], users: int, rounds: int) -> list[list[float]]:
    """Seconds of decode steps with so many answers, of each engine."""
    from quantkit.executor.sampling.params import SamplingParams

    found: list[list[float]] = [[] for _ in engines]
    for engine in engines:
        for number, prompt in enumerate(asked(users, engine.loaded.config.vocab_size, 24)):
            engine.submit(prompt, SamplingParams(max_new_tokens=900, ignore_eos=True), number)
        while len(engine.scheduler.running) < users or any(
            len(one.token_ids) < 4 for one in engine.scheduler.running
        ):
            engine.step()
    for _ in range(rounds):
        for engine, times in zip(engines, found):
            engine.step()
            times += [seconds(engine.step) for _ in range(BLOCK)]
    for engine in engines:
        for sequence in list(engine.scheduler.running):
            engine.cancel(sequence)
    return found


def prompts(engines: list[Any], length: int, rounds: int) -> list[list[float]]:
    """Seconds of a prompt up to its first token, of each engine."""
    from quantkit.executor.sampling.params import SamplingParams

    params, found = SamplingParams(max_new_tokens=1, ignore_eos=True), [[] for _ in engines]
    for number in range(rounds + 1):
        for engine, times in zip(engines, found):
            prompt = asked(1, engine.loaded.config.vocab_size, length)
            taken = seconds(partial(list, engine.generate(prompt, params)))
            times += [taken] if number else []
    return found


def line(label: str, found: list[list[float]]) -> str:
    int4, int8 = ([statistics.median(times) * 1e3, min(times) * 1e3] for times in found)
    cells = "  ".join(
        f"{name} {median:8.2f} ({least:7.2f}) ms"
        for name, (median, least) in (("int4", int4), ("int8", int8))
    )
    return (
        f"{label}  {cells}  speed of int8 over int4 {int4[0] / int8[0]:.2f} "
        f"({int4[1] / int8[1]:.2f})"
    )


def models(options: argparse.Namespace, folder: Path) -> None:
    from quantkit.executor.engine import Engine

    for name in options.models.split(","):
        paths = quantized(name, folder)
        engines = [
            Engine.load(path, device="cpu", max_batch=64, max_model_len=1088, cache_tokens=40000)
            for path in paths
        ]
        print(f"{name}, threads: {options.threads}, load {os.getloadavg()[0]:.1f}")
        for users in map(int, options.users.split(",")):
            print(line(f"users {users:4}", steps(engines, users, max(4, 60 // users))), flush=True)
        for length in map(int, options.prompts.split(",")):
            print(line(f"prompt {length:3}", prompts(engines, length, 5)), flush=True)


def linears() -> None:
    from quantkit_kernels.cpu import int8
    from quantkit_kernels.cpu.linear import linear
    from quantkit_kernels.samples import random_weight

    if not int8.has_blocks():
        raise SystemExit("--linears needs a processor with AVX-512 and VNNI, and a C++ compiler")
    rng, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    print(
        f"AMX: {torch.cpu._is_amx_tile_supported()}, VNNI: {torch.cpu._is_vnni_supported()}; us, "
        "least of 15: C++ / oneDNN / int4"
    )
    for n, k in SHAPES:
        weight = random_weight("int8", n, k, rng)
        few, many = (
            int8.VnniInt8Linear(weight, torch.bfloat16),
            int8.OneDnnInt8Linear(weight, torch.bfloat16),
        )
        many._block = None  # oneDNN for any number of rows
        four, cells = linear(random_weight("int4-asym-128", n, k, rng), torch.bfloat16, cpu), []
        for m in ROWS:
            x = torch.randn(m, k, generator=rng).bfloat16()
            times: list[list[float]] = [[], [], []]
            for _ in range(16):
                for one, own in zip((few, many, four), times):
                    began = time.perf_counter()
                    one.rows(x)
                    own.append((time.perf_counter() - began) * 1e6)
            cells.append(f"M={m} " + "/".join(f"{min(own[1:]):.0f}" for own in times))
        print(f"{n} x {k}: " + "  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--models", default="tiny-r1,qwen3-dense,qwen3-moe,qwen3-odd")
    parser.add_argument("--users", default="1,3,8,32")
    parser.add_argument("--prompts", default="64,512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--linears", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.linears:
        return linears()
    if options.folder is not None:
        options.folder.mkdir(exist_ok=True)
        return models(options, options.folder)
    with tempfile.TemporaryDirectory() as folder:
        return models(options, Path(folder))


if __name__ == "__main__":
    main()
