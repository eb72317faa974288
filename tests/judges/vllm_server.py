"""vLLM as `quantkit deploy` prints it, on one host: every box of a layout has processes of its own,
and addresses are those of loopback.

Of the printed commands the program is filled in (PYTHON -m vllm.entrypoints.cli.main), the ports,
and what the caller adds. Where prefill and decode are apart, `quantkit proxy` stands in front, as
the layout says.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import vllm_cuda
from vllm_tokens import MAX_TOKENS

from quantkit.deploy.launch import Deployment

KEY = "key-of-this-run"
FIRST_PORT, PORTS, APART_BY = (
    20000,
    256,
    8,
)  # below those that the system gives away; a process takes several from its first on
# A box sees no shared memory of another: vLLM tells by it who is on the same machine.
APART = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "box")
SETTINGS = {
    # The all-reduce over symmetric memory needs NVLink's multicast, which not every host lends.
    "cuda": {
        **vllm_cuda.SETTINGS,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    },
    "cpu": {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    },
}


class Server:
    """The processes of a deployment, or of several alike behind one proxy, and the answers of the
    address in front of them."""

    def __init__(
        self,
        made: Sequence[Deployment],
        number: int,
        cards: Sequence[int],
        device: str,
        python: str,
        logs: Path,
        more: Sequence[str],
    ) -> None:
        """number: no other server that runs at the same time may have it. logs: what the names of
        their logs begin with."""
        self.logs, self.began = logs, time.monotonic()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._ports = iter(
            range(FIRST_PORT + PORTS * number, FIRST_PORT + PORTS * (number + 1), APART_BY)
        )
        tiny = (
            {"VLLM_MLA_DISABLE": "1"} if logs.name.startswith("tiny-r1") else {}
        )  # its heads are too small for it
        self._told = {**os.environ, **SETTINGS[device], **tiny, "VLLM_API_KEY": KEY}
        served: dict[str, list[str]] = {}
        boxes = sum(len(each.launches) for each in made)
        left = [
            cards[box * len(cards) // boxes : (box + 1) * len(cards) // boxes]
            for box in range(boxes)
        ]
        for each in made:
            meeting = {
                role: next(self._ports) for role in {launch.role for launch in each.launches}
            }
            for launch in each.launches:
                box, visible = str(boxes - len(left)), ",".join(map(str, left.pop(0)))
                for environment, command in launch.commands:
                    port = next(self._ports)
                    if "--port" in command:
                        served.setdefault(launch.role, []).append(
                            f"http://{command[command.index('--host') + 1]}:{port}"
                        )
                    filled = _filled(command, python, port, meeting[launch.role])
                    apart = APART if boxes > 1 and _may_be_apart() else ()
                    self._start(
                        [*apart, *filled, *more],
                        {**environment, "CUDA_VISIBLE_DEVICES": visible},
                        box,
                    )
        self.url = (
            served["server"][0] if "server" in served else f"http://127.0.0.1:{next(self._ports)}"
        )
        if "prefill" in served:
            asked = [
                "proxy",
                "--prefill",
                ",".join(served["prefill"]),
                "--decode",
                ",".join(served["decode"]),
                "--port",
                self.url[-5:],
            ]
            self._start([sys.executable, "-m", "quantkit", *asked], {}, "proxy")

    def _start(self, command: list[str], environment: dict[str, str], name: str) -> None:
        own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(self._ports))}
        # Of the workers of a box that other boxes reach, each looks for a free port from VLLM_PORT
        # on, and two may find the same one.
        if "--nnodes" not in command:
            own["VLLM_PORT"] = str(next(self._ports) + 1)
        log = (self.logs.parent / f"{self.logs.name}.{name}.log").open("wb")
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        told = {**self._told, **environment, **own}
        self.processes.append(
            subprocess.Popen(
                command, env=told, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        )

    def wait(self, seconds: float) -> None:
        """Until it serves. Raises RuntimeError where it does not within `seconds` of its start, or
        where a process of it ended."""
        while not self.up():
            if time.monotonic() - self.began > seconds:
                raise RuntimeError("it did not come up in time")
            time.sleep(0.5)

    def up(self) -> bool:
        """Whether it serves. Raises RuntimeError where a process of it ended."""
        ended = [
            number for number, process in enumerate(self.processes) if process.poll() is not None
        ]
        if ended:
            raise RuntimeError(
                f"process {ended[0]} ended with {self.processes[ended[0]].returncode}"
            )
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def answer(self, model: str, prompt: list[int]) -> dict[str, Any]:
        """{"tokens", "logprobs"} as vllm_run.py gives them, of a greedy continuation."""
        asked = {
            "model": model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
        }
        asked |= {"return_tokens_as_token_ids": True}
        reply = httpx.post(
            f"{self.url}/v1/completions",
            json=asked,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=300,
        )
        if reply.status_code != 200:
            raise RuntimeError(f"it answers {reply.status_code}: {reply.text[:300]}")
        found = reply.json()["choices"][0]["logprobs"]
        top = [
            [[_token(name), value] for name, value in position.items()]
            for position in found["top_logprobs"]
        ]
        return {"tokens": [_token(name) for name in found["tokens"]], "logprobs": top}

    def guessed(self) -> str:
        """What the server counts of its MTP layer's guesses; empty where it has none."""
        counted = dict(
            re.findall(
                r"^vllm:spec_decode_num_(draft_tokens|accepted_tokens)_total{[^}]*} ([0-9.]+)$",
                self._metrics(),
                re.M,
            )
        )
        return (
            f"{float(counted['accepted_tokens']):.0f} of {float(counted['draft_tokens']):.0f} "
            "guesses taken"
            if len(counted) == 2
            else ""
        )

    def _metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=5).text

    def find(self, title: str, number: int | None = None) -> int:
        """The process whose title begins so, such as VLLM::Worker_TP1: of the command with that
        number, or of any.

        Raises ProcessLookupError where there is none.
        """
        groups = {
            process.pid
            for process in (
                self.processes if number is None else self.processes[number : number + 1]
            )
        }
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "cmdline").read_bytes().startswith(title.encode()) and os.getpgid(
                    int(folder.name)
                ) in groups:
                    return int(folder.name)
        raise ProcessLookupError(f"no process of {self.logs.name} is called {title}")

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + 10
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.1))
            with suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # vLLM's workers too, which a stopped server may leave
            process.wait()


@cache
def _may_be_apart() -> bool:
    """Whether this machine lets a process have mounts of its own."""
    return subprocess.run([*APART, "true"], capture_output=True).returncode == 0


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _filled(command: Sequence[str], python: str, port: int, meeting: int) -> list[str]:
    words = (
        [python, "-m", "vllm.entrypoints.cli.main", *command[1:]]
        if command[0] == "vllm"
        else list(command)
    )
    for option, value in (
        ("--port", port),
        ("--master-port", meeting),
        ("--data-parallel-rpc-port", meeting),
    ):
        if option in words:
            words[words.index(option) + 1] = str(value)
    return words
