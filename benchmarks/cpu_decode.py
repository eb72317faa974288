"""Decoding and prompts on a CPU: tokens/s of quantkit in W4A16 next to transformers and vLLM in
bfloat16, on one machine in one run.

    python benchmarks/cpu_decode.py [--vllm .venv-vllm/bin/python] [--rounds 3] [--threads 1]
    [--prompts] [--out FILE.json]

Models: a dense one of Qwen2.5-0.5B's shape with random weights, made here, and tiny-r1, which has
experts and MLA (vLLM on CPU takes no quantized experts, and has no int4 product without AVX-512, so
it runs the dense one, in bfloat16). Each engine is a process of its own that loads, warms up, and
answers `concurrency` requests of 32 tokens with 16 tokens each, greedily. Its figure is of decoding
alone: the tokens after the first, over the time of all 16 less that of one. With --prompts, and the
dense model alone, it is of prompts: the tokens of
`concurrency` prompts of 1024, over the time until each has its first token. Time is the process's
own processor time, which other work on the machine lengthens little; with one thread it is the time
by the clock of an idle machine. Engines take turns, round after round; the median counts, and
ratios are formed round by round. transformers computes its batch unpadded, all prompts being of one
length.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from core import Spread, about, parser, print_about

INPUT, OUTPUT, PROMPT = 32, 16, 1024
CONTEXT = PROMPT + OUTPUT
CONCURRENCIES = (1, 8)
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def write_random(path: Path, config: dict[str, Any]) -> Path:
    """Random weights that keep activations near 1, in bfloat16, with tiny-r1's tokenizer."""
    from safetensors.torch import save_file

    from quantkit.checkpoint.hub import find_model
    from quantkit.models import find_architecture

    architecture = find_architecture(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        if row.role == "norm":
            tensors[row.name] = torch.ones(row.shape, dtype=torch.bfloat16)
        else:
            tensors[row.name] = (
                torch.randn(row.shape, generator=generator) * row.shape[-1] ** -0.5
            ).bfloat16()
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((find_model("tiny-r1") / name).read_bytes())
    return path


def prompts(count: int, vocab: int, length: int = INPUT) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(2, vocab, (count, length), generator=generator).tolist()


Generate = Callable[[list[list[int]], int], object]
"""Continues prompts by so many tokens."""


def prompt_rate(generate: Generate, vocab: int) -> dict[int, float]:
    """Prompt tokens per second by concurrency."""
    found = {}
    generate(prompts(1, vocab, PROMPT // 2), 1)
    for count in CONCURRENCIES:
        asked, began = prompts(count, vocab, PROMPT), time.process_time()
        generate(asked, 1)
        found[count] = count * PROMPT / (time.process_time() - began)
    return found


def decoding_rate(generate: Generate, vocab: int) -> dict[int, float]:
    """Tokens per second by concurrency."""
    found = {}
    for count in CONCURRENCIES:
        asked, seconds = prompts(count, vocab), {}
        for length in (3, 1, OUTPUT):  # the first warms up
            began = time.process_time()
            generate(asked, length)
            seconds[length] = time.process_time() - began
        found[count] = count * (OUTPUT - 1) / (seconds[OUTPUT] - seconds[1])
    return found


Rate = Callable[[Generate, int], dict[int, float]]
RATES: dict[str, Rate] = {"decode": decoding_rate, "prompts": prompt_rate}


def measure_quantkit(path: str, vocab: int, rate: Rate) -> dict[int, float]:
    from quantkit.executor.engine import Engine
    from quantkit.executor.sampling.params import SamplingParams

    engine = Engine.load(
        Path(path), device="cpu", max_batch=max(CONCURRENCIES), max_model_len=CONTEXT
    )
    return rate(
        lambda asked, length: list(
            engine.generate(asked, SamplingParams(max_new_tokens=length, ignore_eos=True))
        ),
        vocab,
    )


@torch.inference_mode()
def measure_transformers(path: str, vocab: int, rate: Rate) -> dict[int, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def generate(asked: list[list[int]], length: int) -> None:
        step = model(torch.tensor(asked), use_cache=True, logits_to_keep=1)
        for _ in range(length - 1):
            step = model(
                step.logits[:, -1:].argmax(-1), past_key_values=step.past_key_values, use_cache=True
            )

    return rate(generate, vocab)


def measure_vllm(path: str, vocab: int, rate: Rate) -> dict[int, float]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=path,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=max(CONCURRENCIES),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=True,
    )

    def generate(asked: list[list[int]], length: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.generate([{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False)

    return rate(generate, vocab)


ENGINES = {"quantkit": measure_quantkit, "transformers": measure_transformers, "vllm": measure_vllm}


def in_process(
    python: str, engine: str, path: Path, vocab: int, threads: int, what: str
) -> dict[str, float]:
    command = [python, __file__, "--measure", engine, str(path), str(vocab), what]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if engine == "vllm" else {}
    done = subprocess.run(
        command,
        env={**os.environ, **binding, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{engine} failed on {path}:\n{done.stderr[-3000:]}")
    answer: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from quantkit.checkpoint.hub import find_model
    from quantkit.quantization.convert import convert

    dense = write_random(folder / "qwen2-0.5b", QWEN)
    plain = folder / "tiny-r1-bf16"
    convert(find_model("tiny-r1"), plain, dtype="bf16")
    cases = {"dense 0.5B": (dense, QWEN["vocab_size"])} | (
        {} if options.prompts else {"tiny-r1": (plain, 640)}
    )
    what = "prompts" if options.prompts else "decode"
    report: dict[str, Any] = about() | {"threads": options.threads, "what": what, "models": {}}
    print_about(report)
    for name, (source, vocab) in cases.items():
        packed = folder / f"{source.name}-w4a16"
        make = [
            sys.executable,
            "-m",
            "quantkit",
            "quantize",
            str(source),
            "--scheme",
            "rtn-w4a16",
            "--out",
            str(packed),
        ]
        subprocess.run(make, check=True, capture_output=True)
        places = {"quantkit": (sys.executable, packed), "transformers": (sys.executable, source)}
        if options.vllm and name.startswith("dense"):
            places["vllm"] = (options.vllm, source)
        rows: dict[str, list[dict[str, float]]] = {engine: [] for engine in places}
        for number in range(options.rounds):
            for engine, (python, path) in places.items():
                rows[engine].append(in_process(python, engine, path, vocab, options.threads, what))
                load = os.getloadavg()[0]
                print(
                    f"{name}, round {number + 1}, {engine}: {rows[engine][-1]} tokens/s, load "
                    f"{load:.1f}",
                    flush=True,
                )
        report["models"][name] = rows
        for engine, found in rows.items():
            for count in map(str, CONCURRENCIES):
                ratios = [
                    ours[count] / theirs[count] for ours, theirs in zip(rows["quantkit"], found)
                ]
                rates = Spread.of([row[count] for row in found])
                line = f"{name}, concurrency {count}: {engine} {rates} tokens/s"
                print(
                    line
                    if engine == "quantkit"
                    else f"{line}; quantkit / {engine} = {Spread.of(ratios)}",
                    flush=True,
                )
    return report


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--vllm", help="Python of an environment with vLLM for CPUs")
    given.add_argument("--rounds", type=int, default=3)
    given.add_argument("--threads", type=int, default=1)
    given.add_argument("--out", type=Path)
    given.add_argument("--prompts", action="store_true", help="prompts instead of decoding")
    given.add_argument(
        "--measure", nargs=4, metavar=("ENGINE", "PATH", "VOCAB", "RATE"), help=argparse.SUPPRESS
    )
    options = given.parse_args()
    if options.measure:
        engine, path, vocab, what = options.measure
        answer, sys.stdout = sys.stdout, sys.stderr  # engines print; the answer must be alone
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        print(json.dumps(ENGINES[engine](path, int(vocab), RATES[what])), file=answer, flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = run(options, Path(folder))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
