"""Decoding and prompts on a CPU: tokens/s of quantkit in W4A16 next to transformers and vLLM in
bfloat16, or of a published model next to llama.cpp and vLLM, on one machine in one run.

    python benchmarks/cpu_decode.py [--vllm .venv-vllm/bin/python] [--rounds 3] [--threads 1]
    [--prompts] [--out FILE.json]
    python benchmarks/cpu_decode.py --llama .venv-llama/bin/python --model DIR --gguf Q4_1.gguf
    [--vllm .venv-vllm/bin/python] [--rounds 3] [--threads 1] [--out FILE.json]

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

With --llama both figures are of --model, a folder, rounded here to W4A16 in the groups that fit it
and to INT8, which cost the same time as the schemes that calibrate, the head to 8 bits in groups of
64, as both files of llama.cpp have it; and of --gguf, the same model in Q4_1, which llama.cpp
itself makes Q8_0 of. llama.cpp is called as its own examples do, one batch for all sequences, and
picks the likeliest token by numpy. vLLM has the model in bfloat16, and both roundings with the head
in 16 bits: on a CPU it has no product for one of 8. With more than one thread its figures, too, are
of processor time: tokens of a second of all threads, waiting for each other included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from core import Spread, about, parser, print_about
from cpu_rates import CONCURRENCIES, CONTEXT, RATES, Rate

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


ENGINES = {
    "quantkit": measure_quantkit,
    "transformers": measure_transformers,
    "vllm": measure_vllm,
}


@dataclass(frozen=True)
class Peer:
    """label: of a row; engine: of ENGINES, or llama.cpp; ours: the label of quantkit's row it stands next to."""

    label: str
    engine: str
    python: str
    path: Path
    ours: str = "quantkit"


def in_process(peer: Peer, vocab: int, threads: int, what: str) -> dict[str, float]:
    own = str(peer.path), str(vocab), what
    command = (
        [peer.python, str(Path(__file__).with_name("cpu_rates.py")), *own]
        if peer.engine == "llama.cpp"
        else [peer.python, __file__, "--measure", peer.engine, *own]
    )
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if peer.engine == "vllm" else {}
    done = subprocess.run(
        command,
        env={**os.environ, **binding, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{peer.label} failed on {peer.path}:\n{done.stderr[-3000:]}")
    answer: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def quantized(source: Path, out: Path, recipe: str, *options: str) -> Path:
    """Rounded to nearest by a recipe of one line or more."""
    written = out.with_suffix(".yaml")
    written.write_text(recipe)
    make = [sys.executable, "-m", "quantkit", "quantize", str(source), "--recipe", str(written)]
    subprocess.run([*make, "--out", str(out), *options], check=True, capture_output=True)
    return out


def synthetic(options: argparse.Namespace, folder: Path) -> dict[str, tuple[int, list[Peer]]]:
    """Vocabulary and peers of a dense model with random weights and, but for prompts, tiny-r1."""
    from quantkit.checkpoint.hub import find_model
    from quantkit.quantization.convert import convert

    dense, plain = write_random(folder / "qwen2-0.5b", QWEN), folder / "tiny-r1-bf16"
    convert(find_model("tiny-r1"), plain, dtype="bf16")
    cases = {"dense 0.5B": (QWEN["vocab_size"], dense)}
    if not options.prompts:
        cases["tiny-r1"] = (640, plain)
    found = {}
    for name, (vocab, source) in cases.items():
        packed = quantized(source, folder / f"{source.name}-w4a16", "scheme: rtn-w4a16")
        peers = [
            Peer("quantkit", "quantkit", sys.executable, packed),
            Peer("transformers", "transformers", sys.executable, source),
        ]
        if options.vllm and name.startswith("dense"):
            peers.append(Peer("vllm", "vllm", options.vllm, source))
        found[name] = (vocab, peers)
    return found


def published(options: argparse.Namespace, folder: Path) -> dict[str, tuple[int, list[Peer]]]:
    """--model next to llama.cpp, and to vLLM if --vllm is given, in both widths."""
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    recipes = {"W4A16": "scheme: rtn-w4a16", "INT8": "scheme: int8-a8w8c16\nmethods: []"}
    head = ["--override", "lm_head bits=8 group_size=64"]
    int4, int8 = (
        quantized(options.model, folder / name, recipe, *head) for name, recipe in recipes.items()
    )
    wider = folder / "Q8_0.gguf"
    requantize = (
        "import llama_cpp, sys; how = llama_cpp.llama_model_quantize_default_params();"
        "how.ftype, how.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True;"
        "sys.exit(llama_cpp.llama_model_quantize(*map(str.encode, sys.argv[1:3]), how))"
    )
    command = [options.llama, "-c", requantize, str(options.gguf), str(wider)]
    subprocess.run(command, check=True, capture_output=True)
    peers = [
        Peer("quantkit W4A16", "quantkit", sys.executable, int4, "quantkit W4A16"),
        Peer("llama.cpp Q4_1", "llama.cpp", options.llama, options.gguf, "quantkit W4A16"),
        Peer("quantkit INT8", "quantkit", sys.executable, int8, "quantkit INT8"),
        Peer("llama.cpp Q8_0", "llama.cpp", options.llama, wider, "quantkit INT8"),
    ]
    if options.vllm:
        peers.append(Peer("vLLM BF16", "vllm", options.vllm, options.model, "quantkit W4A16"))
        for name, recipe in recipes.items():
            made = quantized(options.model, folder / f"vllm-{name}", recipe, "--engine", "vllm")
            peers.append(Peer(f"vLLM {name}", "vllm", options.vllm, made, f"quantkit {name}"))
    return {options.model.name: (vocab, peers)}


def measured(
    name: str, vocab: int, peers: list[Peer], what: str, options: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Tokens/s by peer, round and concurrency."""
    rows: dict[str, list[dict[str, float]]] = {peer.label: [] for peer in peers}
    for number in range(options.rounds):
        for peer in peers:
            rows[peer.label].append(in_process(peer, vocab, options.threads, what))
            said = f"{what} of {name}, round {number + 1}, {peer.label}: {rows[peer.label][-1]}"
            print(f"{said} tokens/s, load {os.getloadavg()[0]:.1f}", flush=True)
    for peer in peers:
        found, own = rows[peer.label], rows[peer.ours]
        for count in found[0]:
            ratios = [ours[count] / theirs[count] for ours, theirs in zip(own, found)]
            rates = Spread.of([row[count] for row in found])
            line = f"{what} of {name}, concurrency {count}: {peer.label} {rates} tokens/s"
            if peer.label != peer.ours:
                line += f"; {peer.ours} / {peer.label} = {Spread.of(ratios)}"
            print(line, flush=True)
    return rows


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    real = options.llama is not None
    cases = (published if real else synthetic)(options, folder)
    rates = ["decode", "one prompt"] if real else ["prompts" if options.prompts else "decode"]
    report: dict[str, Any] = about() | {"threads": options.threads}
    print_about(report)
    for what in rates:
        report[what] = {
            name: measured(name, vocab, peers, what, options)
            for name, (vocab, peers) in cases.items()
        }
    return report


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--vllm", help="Python of an environment with vLLM for CPUs")
    given.add_argument("--rounds", type=int, default=3)
    given.add_argument("--threads", type=int, default=1)
    given.add_argument("--out", type=Path)
    given.add_argument("--llama", help="Python of an environment with llama-cpp-python")
    given.add_argument("--model", type=Path, help="with --llama: a published model's folder")
    given.add_argument("--gguf", type=Path, help="with --llama: the same model in Q4_1")
    given.add_argument("--prompts", action="store_true", help="prompts instead of decoding")
    given.add_argument(
        "--measure", nargs=4, metavar=("ENGINE", "PATH", "VOCAB", "RATE"), help=argparse.SUPPRESS
    )
    options = given.parse_args()
    if bool(options.llama) != bool(options.model and options.gguf):
        given.error("--llama, --model and --gguf go together")
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
