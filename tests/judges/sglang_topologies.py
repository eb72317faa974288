"""The command that `quantkit deploy` prints for SGLang on one box, run on cards; SGLang must give
quantkit's tokens.

    python tests/judges/sglang_topologies.py --sglang PYTHON --directory DIR --cards 1 --cases
    deepseek_v3-middle:awq:tensor python tests/judges/vllm_topologies.py --directory DIR --cards 1
    --steps compare --engine "sglang 0.5.16" --machine H200

The first writes checkpoints and DIRECTORY/topologies.json as vllm_topologies.py does, the second
judges. What is added to the printed
command is in ADDED: prompts are token ids, attention is Triton's and sampling torch's, so that
flashinfer is not asked, nothing is captured, and memory is given, so that several servers run
beside each other on the same cards.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from vllm_server import KEY
from vllm_tokens import MAX_TOKENS
from vllm_topologies import CONTEXT, TOPOLOGIES, Case, run, write

from quantkit.deploy.launch import deploy

FIRST_PORT, PORTS = 21000, 64
ADDED = (
    *(
        "--api-key",
        KEY,
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--attention-backend",
        "triton",
        "--sampling-backend",
        "pytorch",
    ),
    *(
        "--disable-cuda-graph",
        "--disable-custom-all-reduce",
        "--max-running-requests",
        "8",
        "--max-total-tokens",
        "16384",
    ),
)
MEMORY = "0.6"  # of what is free when a server starts; the tokens above take little of it
HEADERS = {"Authorization": f"Bearer {KEY}"}


class SglangServer:
    """A server, its log, and its answers, as vllm_server.Server has them."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], port: int, log: Path
    ) -> None:
        self.began, self.url = time.monotonic(), f"http://127.0.0.1:{port}"
        with log.open("wb") as written:
            written.write(f"$ {' '.join(command)}\n".encode())
            written.flush()
            told = {**os.environ, **environment}
            self.process = subprocess.Popen(
                command, env=told, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, seconds: float) -> None:
        """Until it serves. Raises RuntimeError where it does not within `seconds` of its start, or
        where it ended."""
        while not self._is_up():
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended with {self.process.returncode}")
            if time.monotonic() - self.began > seconds:
                raise RuntimeError("it did not come up in time")
            time.sleep(0.5)

    def _is_up(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", headers=HEADERS, timeout=5).status_code == 200
        return False

    def answer(self, model: str, prompt: list[int]) -> dict[str, Any]:
        """{"tokens", "logprobs"} of a greedy continuation."""
        sampling = {"temperature": 0, "max_new_tokens": MAX_TOKENS, "ignore_eos": True}
        asked = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 5,
        }
        reply = httpx.post(f"{self.url}/generate", json=asked, headers=HEADERS, timeout=300)
        if reply.status_code != 200:
            raise RuntimeError(f"it answers {reply.status_code}: {reply.text[:300]}")
        found = reply.json()["meta_info"]
        top = [
            [[token, value] for value, token, *_ in position]
            for position in found["output_top_logprobs"]
        ]
        return {
            "tokens": [token for _, token, *_ in found["output_token_logprobs"]],
            "logprobs": top,
        }

    def guessed(self) -> str:
        return ""

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def command_of(
    path: Path, python: str, cards: int, port: int, guesses: int
) -> tuple[dict[str, str], list[str]]:
    """Environment and words: what deploy prints, with PYTHON, the port and ADDED filled in."""
    made = deploy(
        path,
        "sglang",
        layout="one-box",
        device="cuda",
        devices=cards,
        context=CONTEXT,
        draft_length=guesses,
    )
    ((environment, printed),) = made.launches[0].commands
    words = [python, *printed[1:]]
    words[words.index("--port") + 1] = str(port)
    words[words.index("--mem-fraction-static") + 1] = MEMORY
    return environment, [*words, *ADDED, "--nccl-port", str(port + PORTS // 2)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sglang", default=sys.executable, help="python of an environment with SGLang"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        required=True,
        help="checkpoints and answers; what is there is not written again",
    )
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument(
        "--cases", required=True, help="MODEL:FORMAT:tensor or mtp, comma-separated"
    )
    parser.add_argument("--beside", type=int, default=1, help="servers at a time")
    parser.add_argument(
        "--seconds", type=float, default=300, help="that a server may take to come up"
    )
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with it
    asked.directory.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = [tuple(case.split(":")) for case in asked.cases.split(",")]
    for model in dict.fromkeys(model for model, _, _ in cases):
        write(
            asked.directory,
            model,
            list(dict.fromkeys(format for other, format, _ in cases if other == model)),
            "cpu",
        )

    def start(number: int, case: Case) -> SglangServer:
        model, format, topology = case
        port = FIRST_PORT + PORTS * number
        guesses = TOPOLOGIES[topology].guesses
        environment, words = command_of(
            asked.directory / model / format, asked.sglang, asked.cards, port, guesses
        )
        return SglangServer(
            words, environment, port, asked.directory / f"sglang-{'-'.join(case)}.log"
        )

    run(asked.directory, cases, asked.seconds, asked.beside, float("inf"), start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
