"""vLLM on an NVIDIA GPU as a judge: mixtures of experts in every format it is said to load must
give quantkit's tokens.

    make test-vllm-cuda VLLM=PYTHON              # python tests/judges/vllm_cuda.py --vllm PYTHON, of an environment with vLLM for CUDA

Every case is a model as `quantkit quantize` wrote it, calibration and folded scales included:
tiny-r1, which is trained, and random weights of DeepSeek-V3, Qwen3-MoE and openPangu. vLLM
continues four prompts greedily; quantkit computes the same positions on the CPU, each given the
same tokens before it. Where two tokens are as likely as BF16 can tell, either may come first, and
the position is not counted. Nor can BF16 tell two experts apart that the router scores alike:
positions are left out where quantkit's own choice of experts changes when the router's weights move
by a last place of BF16. Of the others SAME of the tokens must be equal, and the median difference
of log-probabilities below TOLERANCE. Two controls show that this tells right from wrong.

The three steps, each with its files in --directory, can run on different machines: write (quantkit,
CPU), run (vLLM, GPU), compare.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from dense_models import EXPERTS, random_weights
from make_model import write_dense
from tokenizers import Tokenizer
from torch import Tensor
from vllm_tokens import INT8_TIE, MAX_TOKENS, TIE, judge, prompts, shift_zero_points

import quantkit
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.evaluation.distance.tracing import TracedModel
from quantkit.executor.weights.load import load_model
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.schemes import find_scheme
from quantkit.models.mlp import MoeMlp
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert

TINY_R1 = Path(quantkit.__file__).parent / "builtin" / "tiny-r1"
MODELS = ("tiny-r1", *EXPERTS)
SOURCE = "source"  # tiny-r1's is FP8 blocks, the others' BF16
FORMATS = {
    "awq": ("awq-w4a16", "awq"),
    "ct-w4a16": ("awq-w4a16", "compressed-tensors"),
    "ct-w4a16-symmetric": ("awq-w4a16", "compressed-tensors"),
    "ct-w8a8": ("int8-a8w8c16", "compressed-tensors"),
    "ct-nvfp4": ("fp4-w4a16", "compressed-tensors"),
    "modelopt": ("fp4-w4a16", "modelopt"),
}
# Marlin multiplies by matrices of a multiple of 64 rows, and tiny-r1's kv_a_proj_with_mqa has 160.
# SGLang's profile leaves it plain in compressed-tensors of 4 bits, and the other formats are
# converted from those.
CONVERTED = {"awq": "ct-w4a16", "modelopt": "ct-nvfp4"}
# Without FlashInfer, and without DeepGEMM, which is compiled at the first FP8 product: neither is
# under test.
SETTINGS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
}
SHIFTED = "shifted"  # the control: AWQ with zero points one off,
CONTROLS = ("deepseek_v3", "qwen3_moe")  # of these
# What 0.22 says instead of loading it, unlike the profile's release; and where it has not the fault
# that the profile warns of.
REFUSED_BY_0_22 = {"ct-w4a16": "Only symmetric quantization is supported for MoE"}
RIGHT_IN_0_22 = ("ct-w4a16-symmetric",)
SAME = 0.97  # share of the counted positions with the same token,
TOLERANCE = 0.1  # and median difference of the log-probabilities of the five likeliest tokens,
# but where activations are rounded: to int8 by both engines, to FP8 by vLLM alone.
ROUNDED = {("tiny-r1", SOURCE): 0.2, **{(model, "ct-w8a8"): 0.2 for model in MODELS}}


def write(directory: Path, model: str, formats: Iterable[str]) -> None:
    source = TINY_R1 if model == "tiny-r1" else directory / model / SOURCE
    if not source.exists():
        write_dense(source, EXPERTS[model], random_weights(EXPERTS[model]))
    calibration = directory / f"{model}.jsonl"
    calibration.write_text(
        "".join(
            json.dumps({"text": " ".join(str(i * j % 97) for j in range(60))}) + "\n"
            for i in range(12)
        )
    )
    for format in formats:
        out = directory / model / format
        if format == SOURCE and model == "tiny-r1" and not out.exists():
            shutil.copytree(source, out)
        if format not in FORMATS or (out / "config.json").exists():
            continue
        scheme, written = FORMATS[format]
        asked = find_scheme(scheme)
        if format.endswith("symmetric"):
            assert isinstance(asked.weight, IntGrid), asked
            asked = replace(asked, weight=replace(asked.weight, symmetric=True))
        recipe = Recipe(
            scheme=scheme, calibration=str(calibration), samples=8, held_out=2, seq_len=64
        )
        if model == "tiny-r1" and format in CONVERTED:
            write(directory, model, [CONVERTED[format]])
            convert(directory / model / CONVERTED[format], out, format=written)
            continue
        engine = "sglang" if model == "tiny-r1" and format != "ct-w8a8" else "vllm"
        quantize(source, out, asked, written, recipe, engine=engine, device="cpu")
    if SHIFTED in formats and model in CONTROLS and not (directory / model / SHIFTED).exists():
        shift_zero_points(shutil.copytree(directory / model / "awq", directory / model / SHIFTED))


def asked_of(model: str) -> list[list[int]]:
    """Prompts as token ids: text for the model that is trained."""
    if model != "tiny-r1":
        return prompts(320)
    tokenizer = Tokenizer.from_file(str(TINY_R1 / "tokenizer.json"))
    texts = [
        json.loads(line)["text"]
        for line in (TINY_R1 / "calibration.jsonl").read_text().splitlines()[:4]
    ]
    return [tokenizer.encode(text).ids[:length] for text, length in zip(texts, (8, 16, 24, 40))]


def run(directory: Path, cases: list[tuple[str, str]], vllm: str) -> None:
    """vLLM's answers to every case, in DIRECTORY/FORMAT.answers.json; one process a format, all
    beside each other.

    tiny-r1's heads are smaller than the kernels for latent attention take, so its processes are
    their own, without them.
    """
    running = []
    for format in dict.fromkeys(format for _, format in cases):
        for tiny in (True, False):
            models = [
                model for model, other in cases if other == format and (model == "tiny-r1") == tiny
            ]
            if not models:
                continue
            name = f"{format}-tiny" if tiny else format
            jobs = [
                {
                    "path": str(directory / model / format),
                    "prompts": asked_of(model),
                    "max_tokens": MAX_TOKENS,
                }
                for model in models
            ]
            settings = {**os.environ, **SETTINGS, "VLLM_MLA_DISABLE": str(int(tiny))}
            process = subprocess.Popen(
                [vllm, str(Path(__file__).with_name("vllm_run.py"))],
                stdin=subprocess.PIPE,
                stdout=(directory / f"{name}.answers.json").open("w"),
                stderr=(directory / f"{name}.log").open("w"),
                env=settings,
                text=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(jobs))
            process.stdin.close()
            running.append((name, models, process))
    stopped = [
        f"{directory / name}.log ({', '.join(models)})"
        for name, models, process in running
        if process.wait() != 0
    ]
    if stopped:
        raise SystemExit(f"vLLM stopped, see {' and '.join(stopped)}")


def compare(directory: Path, cases: list[tuple[str, str]]) -> int:
    """Prints a line a case. Returns how many failed."""
    failed = 0
    for model, format in cases:
        name = f"{format}-tiny" if model == "tiny-r1" else format
        models = [
            other
            for other, written in cases
            if written == format and (other == "tiny-r1") == (model == "tiny-r1")
        ]
        told = json.loads((directory / f"{name}.answers.json").read_text())
        index = models.index(model)
        good, line = verdict(
            directory / model, model, format, told["engine"], told["answers"][index]
        )
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {model} {format}: {line}", flush=True)
        if not isinstance(told["answers"][index], dict):
            print(f"       {'; '.join(told['layers'][index])}")
    print(f"{told['engine']}: {len(cases) - failed} passed, {failed} failed")
    return failed


def verdict(directory: Path, model: str, format: str, engine: str, answer: Any) -> tuple[bool, str]:
    path = directory / ("awq" if format == SHIFTED else format)
    earlier = engine.startswith("vllm 0.22.")
    expected = REFUSED_BY_0_22.get(format) if earlier else None
    if isinstance(answer, dict):
        good = expected is not None and expected in answer["error"]
        return good, f"vLLM refuses it{', as known' if good else ''}: {answer['error'][:300]}"
    problems = check_checkpoint("vllm", Checkpoint.open(path), device="cuda")
    said = [problem.problem for problem in problems if problem.severity == "error"]
    mixed_up = any("mixes up scales" in problem.problem for problem in problems) and not (
        earlier and format in RIGHT_IN_0_22
    )
    asked = asked_of(model)
    ties = routing_ties(path, [prompt + each["tokens"] for prompt, each in zip(asked, answer)])
    found = judge(path, asked, answer, INT8_TIE if format == "ct-w8a8" else TIE, ties)
    equal = (
        found.compared > 0
        and found.equal >= SAME * found.compared
        and found.median < ROUNDED.get((model, format), TOLERANCE)
    )
    line = (
        f"{found.equal} of {found.compared} tokens, log-probabilities differ by "
        f"{found.median:.4f}, {found.difference:.4f} in the mean"
    )
    if format == SHIFTED:
        return not equal, f"control, {line}"
    if mixed_up:
        return not equal, f"{'no longer wrong' if equal else 'wrong as the profile says'}, {line}"
    return (
        equal and not said and expected is None,
        f"{line} {said or ''}{' and it was to be refused' if expected else ''}",
    )


@torch.inference_mode()
def routing_ties(path: Path, sequences: list[list[int]]) -> list[Tensor]:
    """bool [tokens] a sequence: where the experts of any layer change in FP32, or with router
    weights moved by a last place of BF16."""
    documents = [torch.tensor(sequence) for sequence in sequences]
    chosen = [_chosen(TracedModel(load_model(path, device="cpu", dtype="float32")), documents)]
    loaded = load_model(path, device="cpu", dtype="bfloat16")
    routers = [
        (layer.mlp, layer.mlp.router)
        for layer in loaded.model.layers
        if isinstance(layer.mlp, MoeMlp)
    ]
    watched = TracedModel(loaded)
    chosen.append(_chosen(watched, documents))
    for seed in range(3):
        for mlp, router in routers:
            sign = torch.randn(router.shape, generator=torch.Generator().manual_seed(seed)).sign()
            mlp.router = router * (1 + sign * 2**-8)
        chosen.append(_chosen(watched, documents))
    changed = torch.stack([(other != chosen[0]).any(1) for other in chosen[1:]]).any(0)
    return list(changed.split([len(sequence) for sequence in sequences]))


def _chosen(watched: TracedModel, documents: list[Tensor]) -> Tensor:
    """int64 [tokens, layers x experts a token]: the experts that each token gets, sorted in each
    layer."""
    experts = watched(documents).topk_ids
    return torch.cat([ids.sort(1).values for ids in experts.values()], dim=1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", default=sys.executable, help="python of an environment with vLLM for CUDA"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        required=True,
        help="checkpoints and answers; what is there is not written again",
    )
    parser.add_argument("--steps", default="write,run,compare")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--formats", default=",".join((SOURCE, *FORMATS, SHIFTED)))
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    formats, steps = asked.formats.split(","), asked.steps.split(",")
    cases = [
        (model, format)
        for model in asked.models.split(",")
        for format in formats
        if format != SHIFTED or model in CONTROLS
    ]
    if "write" in steps:
        for model in asked.models.split(","):
            write(asked.directory, model, formats)
    if "run" in steps:
        run(asked.directory, cases, asked.vllm)
    return int(compare(asked.directory, cases) > 0) if "compare" in steps else 0


if __name__ == "__main__":
    sys.exit(main())
