"""vLLM as `quantkit deploy` prints it, on one host: every box of a layout has processes of its own,
and addresses are those of loopback.

Of the printed commands the program is filled in (PYTHON -m vllm.entrypoints.cli.main), the ports,
and what the caller adds. Where prefill and decode are apart, vllm-router, which that Python must
have, sends requests to the servers of all deployments.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import cache

import httpx
import vllm_tokens
from judged import MAX_TOKENS

KEY = "key-of-this-run"
HEADERS = {"Authorization": f"Bearer {KEY}"}
# Below those that the system gives away; a process takes several from its first on.
FIRST_PORT, PORTS, APART_BY = 20000, 256, 8
# A box sees no shared memory of another: vLLM tells by it who is on the same machine.
APART = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "box")
OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
SETTINGS = {
    # The all-reduce over symmetric memory needs NVLink's multicast, which not every host lends.
    "cuda": {**vllm_tokens.SETTINGS, **OFFLINE, "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"},
    "cpu": {**OFFLINE, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
}


class Server:
    """Processes with a log each, and the address that answers for them."""

    def __init__(self, url):
        self.url, self.began = url, time.monotonic()
        self.processes = []

    def start(self, command, environment, log):
        with log.open("ab") as written:
            written.write(f"$ {' '.join(command)}\n".encode())
            written.flush()
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)

    def wait(self, seconds):
        """Until it serves. Raises RuntimeError where it does not within `seconds` of its start, or
        where a process of it ended."""
        while not self.up():
            if time.monotonic() - self.began > seconds:
                raise RuntimeError("it did not come up in time")
            time.sleep(0.5)

    def up(self):
        """Whether it serves. Raises RuntimeError where a process of it ended."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                raise RuntimeError(f"process {number} ended with {process.returncode}")
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", headers=HEADERS, timeout=5).status_code == 200
        return False

    def post(self, path, body):
        """Raises RuntimeError where it answers with a fault."""
        reply = httpx.post(f"{self.url}{path}", json=body, headers=HEADERS, timeout=300)
        if reply.status_code != 200:
            raise RuntimeError(f"it answers {reply.status_code}: {reply.text[:300]}")
        return reply.json()

    def answer(self, model, prompt):
        """A greedy continuation."""
        asked = {
            "model": model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        found = self.post("/v1/completions", asked)["choices"][0]["logprobs"]
        top = [
            [[_token(name), value] for name, value in position.items()]
            for position in found["top_logprobs"]
        ]
        return {"tokens": [_token(name) for name in found["tokens"]], "logprobs": top}

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + 10
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.1))
            with suppress(ProcessLookupError):  # vLLM's workers too, which may be left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def deployed(made, number, cards, device, python, logs, more):
    """A deployment, or several alike behind one proxy, started. number: no other server that runs
    at the same time may have it. logs: what the names of their logs begin with."""
    ports = iter(range(FIRST_PORT + PORTS * number, FIRST_PORT + PORTS * (number + 1), APART_BY))
    settings = {**SETTINGS[device], "VLLM_API_KEY": KEY}
    if logs.name.startswith("tiny-r1"):  # its heads are too small for it
        settings["VLLM_MLA_DISABLE"] = "1"
    server, served = Server(""), {}

    def start(command, environment, name):
        own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(ports))}
        # Of the workers of a box that other boxes reach, each looks for a free port from VLLM_PORT
        # on, and two may find the same one.
        if "--nnodes" not in command:
            own["VLLM_PORT"] = str(next(ports) + 1)
        log = logs.parent / f"{logs.name}.{name}.log"
        server.start(command, {**settings, **environment, **own}, log)

    boxes, box = sum(launch.role != "router" for each in made for launch in each.launches), 0
    for each in made:
        meeting = {role: next(ports) for role in {launch.role for launch in each.launches}}
        for launch in (one for one in each.launches if one.role != "router"):
            own_cards = cards[box * len(cards) // boxes : (box + 1) * len(cards) // boxes]
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own_cards))}
            for environment, command in launch.commands:
                port = next(ports)
                if "--port" in command:
                    host = command[command.index("--host") + 1]
                    served.setdefault(launch.role, []).append(f"http://{host}:{port}")
                filled = _filled(command, python, port, meeting[launch.role])
                apart = APART if boxes > 1 and _may_be_apart() else ()
                start([*apart, *filled, *more], {**environment, **visible}, str(box))
            box += 1
    if "prefill" in served:
        port = next(ports)
        served["server"] = [f"http://127.0.0.1:{port}"]
        code = (
            "from vllm_router.router import Router, policy_from_str; Router(worker_urls=[], "
            f"host='127.0.0.1', port={port}, policy=policy_from_str('round_robin'), "
            "vllm_pd_disaggregation=True, "
            f"prefill_urls={[(url, None) for url in served['prefill']]}, "
            f"decode_urls={served['decode']}).start()"
        )
        start([python, "-c", code], {"OPENAI_API_KEY": KEY}, "router")
    server.url = served["server"][0]
    return server


@cache
def _may_be_apart():
    """Whether this machine lets a process have mounts of its own."""
    return subprocess.run([*APART, "true"], capture_output=True).returncode == 0


def _token(name):
    return int(name.removeprefix("token_id:"))


def _filled(command, python, port, meeting):
    words = list(command)
    if words[0] == "vllm":
        words[:1] = [python, "-m", "vllm.entrypoints.cli.main"]
    fill(words, {"--port": port, "--master-port": meeting, "--data-parallel-rpc-port": meeting})
    return words


def fill(words, values):
    """Give the options that are among the words other values."""
    for option, value in values.items():
        if option in words:
            words[words.index(option) + 1] = str(value)
