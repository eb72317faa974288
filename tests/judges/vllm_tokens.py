"""vLLM as a judge: it must generate the tokens that quantkit generates, from the same checkpoint.

    make test-engines                   # dense models on a CPU; makes .venv-vllm
    make test-vllm-cuda VLLM=PYTHON     # mixtures of experts on an NVIDIA GPU: --device cuda, of an environment with vLLM for CUDA

Every case is a model as `quantkit quantize` wrote it, calibration and folded scales included. vLLM
continues four prompts greedily; quantkit computes the same positions on the CPU (judged.py). On a
CPU every counted token must be equal; of mixtures of experts 97 %, and the median difference of
log-probabilities small. Controls show that this tells right from wrong: models with their zero
points shifted by one must not pass.

The three steps, each with its files in --directory, can run on different machines: write (quantkit,
CPU), run (vLLM), compare.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from checkpoints import CONVERTED, DENSE, FORMATS, HEADS, MIXTURE, SHIFTED, SOURCE, write
from dense_models import EXPERTS
from judged import MAX_TOKENS, judge, prompts_of

from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint

# vLLM on a CPU takes no experts quantized, and has no NVFP4.
MODELS = {"cpu": (*DENSE, "pangu_ultra_moe"), "cuda": ("tiny-r1", *EXPERTS)}
DENSE_FORMATS = ("awq", "ct-w4a16", "ct-w4a16-symmetric", "ct-w8a8", MIXTURE, "ct-w4a16-from-awq")
DENSE_FORMATS += ("awq-head", "ct-head", "ct-head8")
EXPERT_FORMATS = tuple(format for format in FORMATS if format not in (MIXTURE, *HEADS))
CONTROLS = ("deepseek_v3-dense", "deepseek_v3", "qwen3_moe")
# Without FlashInfer, and without DeepGEMM, which is compiled at the first FP8 product: neither is
# under test.
SETTINGS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
}
# What 0.22 says instead of loading it, unlike the profile's release; and where it has not the fault
# that the profile warns of.
REFUSED_BY_0_22 = {"ct-w4a16": "Only symmetric quantization is supported for MoE"}
RIGHT_IN_0_22 = ("ct-w4a16-symmetric",)


def cases(device, models, formats, every=True):
    """Of those that are asked for; all formats of a model where none are. every: not half of them,
    by turns."""
    found = []
    for at, model in enumerate(models):
        suitable = () if device == "cpu" and model not in DENSE else DENSE_FORMATS
        suitable = EXPERT_FORMATS if device == "cuda" else suitable
        if device == "cuda" and model == "qwen3_moe":
            suitable += ("ct-head8", "ct-ends")
        turns = suitable if every else suitable[at % 2 :: 2]
        for format in (SOURCE, *turns, SHIFTED):
            of_another = format.endswith("from-awq") and (model, format) not in CONVERTED
            control = format == SHIFTED and model not in CONTROLS
            if format in (formats or [format]) and not of_another and not control:
                found.append((model, format))
    return found


def run(directory, asked, vllm, device):
    """vLLM's answers into DIRECTORY/FORMAT.answers.json; on a GPU one process a format, all at
    the same time.

    tiny-r1's heads are smaller than the kernels for latent attention take, so its processes are
    their own, without them.
    """
    running = []
    for name, group in groups(asked, device).items():
        jobs = [
            {
                "path": str(directory / model / format),
                "prompts": prompts_of(model),
                "max_tokens": MAX_TOKENS,
            }
            for model, format in group
        ]
        settings = {**SETTINGS, "VLLM_MLA_DISABLE": str(int(name.endswith("-tiny")))}
        process = subprocess.Popen(
            [vllm, str(Path(__file__).with_name("vllm_run.py"))],
            stdin=subprocess.PIPE,
            stdout=(directory / f"{name}.answers.json").open("w"),
            stderr=(directory / f"{name}.log").open("w"),
            env=os.environ | (settings if device == "cuda" else {}),
            text=True,
        )
        process.stdin.write(json.dumps(jobs))
        process.stdin.close()
        running.append((name, process))
    stopped = [f"{directory / name}.log" for name, process in running if process.wait() != 0]
    if stopped:
        raise SystemExit(f"vLLM stopped, see {' and '.join(stopped)}")


def groups(asked, device):
    """The cases of each process."""
    found = {}
    for model, format in asked:
        name = f"{format}-tiny" if model == "tiny-r1" else format
        found.setdefault("cpu" if device == "cpu" else name, []).append((model, format))
    return found


def compare(directory, asked, device):
    """Prints a line a case. Returns how many failed."""
    failed = 0
    for name, group in groups(asked, device).items():
        told = json.loads((directory / f"{name}.answers.json").read_text())
        whose = "; ".join(f"{grid} products are {one}" for grid, one in told["products"].items())
        print(f"{told['engine']}, {name}. {whose}")
        for (model, format), answer in zip(group, told["answers"]):
            good, line = verdict(directory / model, format, told["engine"], answer, device)
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {model} {format}: {line}", flush=True)
    print(f"{len(asked) - failed} passed, {failed} failed")
    return failed


def verdict(directory, format, engine, answer, device):
    """Whether a model's answers, or vLLM's refusal, are what is expected, and a line about them."""
    path = directory / ("awq" if format == SHIFTED else format)
    earlier = engine.startswith("vllm 0.22.")
    expected = REFUSED_BY_0_22.get(format) if earlier else None
    if isinstance(answer, dict):
        good = expected is not None and expected in answer["error"]
        return good, f"vLLM refuses it{', as known' if good else ''}: {answer['error'][:300]}"
    problems = check_checkpoint("vllm", Checkpoint.open(path), device=device)
    mixed_up = any("mixes up scales" in problem.problem for problem in problems) and not (
        earlier and format in RIGHT_IN_0_22
    )
    said = [one.problem for one in problems if one.severity == "error" or device == "cpu"]
    int8 = format in ("ct-w8a8", MIXTURE, "ct-head8")
    model = directory.name
    mixture = device == "cuda"
    found = judge(path, prompts_of(model), answer, int8=int8, mixture=mixture)
    rounded = int8 or (model, format) == ("tiny-r1", SOURCE)  # to int8, or to FP8 by vLLM alone
    equal = found.mixture_passed(rounded=rounded) if mixture else found.passed(int8=int8)
    if format == SHIFTED:
        return not equal, f"control, {found}"
    if mixed_up and mixture:
        return not equal, f"{'no longer wrong' if equal else 'wrong as the profile says'}, {found}"
    refusal = " and it was to be refused" if expected else ""
    return equal and not said and expected is None, f"{found} {said or ''}{refusal}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default=sys.executable, help="python of an environment with vLLM")
    parser.add_argument("--device", choices=tuple(MODELS), default="cpu")
    parser.add_argument("--directory", type=Path, help="checkpoints and answers; kept for later")
    parser.add_argument("--steps", default="write,run,compare")
    parser.add_argument("--models", default="")
    parser.add_argument("--formats", default="")
    parser.add_argument("--every", action="store_true", help="every format of every model")
    asked = parser.parse_args()
    models = asked.models.split(",") if asked.models else list(MODELS[asked.device])
    formats = asked.formats.split(",") if asked.formats else []
    every = asked.every or bool(formats) or asked.device == "cuda"
    chosen = cases(asked.device, models, formats, every)
    with tempfile.TemporaryDirectory() as temporary:
        directory = asked.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if "write" in asked.steps:
            for model, format in chosen:
                write(directory, model, format)
        if "run" in asked.steps:
            run(directory, chosen, asked.vllm, asked.device)
        return int("compare" in asked.steps and compare(directory, chosen, asked.device) > 0)


if __name__ == "__main__":
    sys.exit(main())
