"""What `quantkit deploy --format` writes, read by the programs it is written for: docker compose,
the schemas of Kubernetes' API, Ray Serve's builders with vLLM's arguments, and a Slurm of this
machine, in which vLLM then serves from two boxes by the line that `quantkit plan` prints.

    PYTHONPATH=.:tests/support python tests/judges/launch_formats.py .venv-launch .venv-vllm     (`make test-launch-formats`)

Every layout of every recipe is read; of each format also one file with a fault, which must be
refused. kubectl has no check without a server: the schemas are those of kubernetes-validate.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from checkpoints import write
from judged import MAX_TOKENS, judge, prompts_of
from make_model import random_tensors, tiny_config
from packed_model import write_packed
from vllm_server import APART, KEY, SETTINGS, Server

from quantkit.checkpoint.formats import compressed_int8
from quantkit.common.errors import UsageError
from quantkit.deploy.formats import find_format
from quantkit.deploy.launch import Deployment, Network, deploy
from quantkit.deploy.script import API_KEY
from quantkit.engines.layouts import recipes
from quantkit.grids.int_groups import IntGrid

MODEL = "deepseek_v3-dense"
BOXES = 10
"""Of the largest layout."""
FAULTS = {
    "compose": ("network_mode: host", "network_mode: [host]"),
    "k8s": ("replicas: 1", "replicas: one"),
    "ray": ("gpu_memory_utilization", "gpu_memory_utilisation"),
    "slurm": ("#SBATCH --nodes=", "#SBATCH --nodes=x"),
}
RAY = """
import importlib, sys, yaml
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.serve.schema import ServeDeploySchema

for path in sys.argv[1:]:
    (app,) = ServeDeploySchema.model_validate(yaml.safe_load(open(path))).applications
    module, name = app.import_path.split(":")
    build = getattr(importlib.import_module(module), name)
    try:
        for config in app.args.get("llm_configs") or list(app.args.values()):
            LLMConfig.model_validate(config).get_engine_config()
        print(path, type(build(app.args)).__name__)
    except ValueError as refused:
        print(path, repr(refused))
"""
# A CPU is one device, and memory is given: a box's own share of it is no card's.
FEW = "--kv-cache-memory-bytes 268435456 --max-num-seqs 8 --max-num-batched-tokens 1024"
EAGER = """--compilation-config '{"mode": 2, "backend": "eager"}'"""


@dataclass(frozen=True)
class File:
    """A layout in one format."""

    name: str
    made: Deployment
    path: Path


def written(model, folder, format):
    files = []
    for recipe in recipes():
        for layout in recipe.layouts:
            asked = find_format(format, hosts=False)
            made = deploy(
                model,
                recipe.engine,
                layout=layout.name,
                device=recipe.device,
                network=Network(scheduled=asked.scheduled),
            )
            name = f"{recipe.engine}-{recipe.device}-{layout.name}"
            try:
                (text,) = asked.write(made)
            except UsageError as refused:
                print(f"none {format} {name}: {refused}", flush=True)
                continue
            path = folder / f"{name}.{format}"
            path.write_text(text)
            files.append(File(name, made, path))
    faulty = folder / f"fault.{format}"
    faulty.write_text(files[0].path.read_text().replace(*FAULTS[format]))
    return [*files, File("fault", files[0].made, faulty)]


def read_by(command, **environment):
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def compose(file, venv):
    """Why docker compose refuses it, or reads other commands in it; empty if it does not."""
    options = ["--file", str(file.path), "--profile", "*", "config", "--format", "json"]
    read = read_by([str(venv / "bin/docker-compose"), *options], **{API_KEY: KEY})
    if not read.stdout:  # the package's exit code is 0 then, too
        return read.stderr
    services = json.loads(read.stdout)["services"].values()
    bodies = [launch.body() for launch in file.made.launches]
    # It writes a dollar twice, as in the file.
    told = ["".join(service["command"]).replace("$$", "$") for service in services]
    missing = [body for body in bodies if not any(one.endswith(body) for one in told)]
    return f"it reads other commands: {missing}" if missing else ""


def k8s(file, venv):
    read = read_by([str(venv / "bin/kubernetes-validate"), "--strict", str(file.path)])
    return read.stderr + read.stdout if read.returncode else ""


def ray(files, venv):
    """As those above, of all files: importing vLLM takes the time."""
    paths = [str(file.path) for file in files]
    read = read_by([str(venv / "bin/python"), "-c", RAY, *paths], PYTHONPATH="")
    told = dict(line.split(" ", 1) for line in read.stdout.splitlines() if line.startswith("/"))
    return [told.get(path, read.stderr[-500:]).replace("Application", "") for path in paths]


def slurm(file, _):
    read = read_by(["sbatch", "--test-only", str(file.path)])
    return read.stderr if read.returncode else ""


@contextmanager
def cluster(folder):
    """Slurm's controller and BOXES nodes, on addresses of loopback."""
    numbers = range(BOXES)
    nodes = [
        f"NodeName=node{n} NodeHostname=localhost NodeAddr=127.0.0.1 Port={17000 + n} "
        "CPUs=2 RealMemory=1000 Gres=gpu:16,npu:16"
        for n in numbers
    ]
    (folder / "slurm.conf").write_text(
        f"""ClusterName=quantkit
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=16817
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/controller.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdTimeout=0
TreeWidth=100
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu,npu
{chr(10).join(nodes)}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
    )
    devices = [folder / f"device{n}" for n in range(16)]
    for path in devices:
        path.touch()
    (folder / "gres.conf").write_text(
        "".join(f"Name={kind} File={folder}/device[0-15]\n" for kind in ("gpu", "npu"))
    )
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"node{n}"] for n in numbers)]
    for made in ("state", *(f"spoolnode{n}" for n in numbers)):
        (folder / made).mkdir()
    with (folder / "slurm.log").open("wb") as log:
        daemons = [subprocess.Popen(one, stdout=log, stderr=log) for one in commands]
        try:
            for _ in range(100):
                state = read_by(["sinfo", "--noheader", "--format", "%D %t"]).stdout
                if state.strip() == f"{BOXES} idle":
                    break
                time.sleep(0.2)
            else:
                raise RuntimeError(f"Slurm's nodes are not ready: {state}; see {log.name}")
            yield
        finally:
            read_by(["scancel", "--user", "root"])
            time.sleep(2)
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(30)


def serves_from_two_boxes(folder, vllm):
    """The line that `plan` prints: tokens come from a pipeline over two boxes; when one of them has
    ended, so has the job."""
    out = write(folder, MODEL, "awq", "cpu")
    programs = folder / "programs"
    programs.mkdir()
    quantkit = f"{sys.executable} -m quantkit"
    settings = [f"{name}={value}" for name, value in SETTINGS["cpu"].items()]
    python = [str(vllm.resolve() / "bin/python"), "-m", "vllm.entrypoints.cli.main"]
    started = shlex.join(["env", "PYTHONPATH=", *settings, *APART, *python])
    for name, text in (
        ("quantkit", f'exec {quantkit} "$@"'),
        ("vllm", f'exec {started} "$@" {FEW} {EAGER}'),
    ):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", API_KEY: KEY}
    asked = f"plan {folder}/{MODEL}/source --scheme awq-w4a16 --engine vllm --layout two-boxes"
    planned = read_by(
        f"{quantkit} {asked} --devices 1x80GiB --context 1024 --json".split(), **environment
    )
    line = json.loads(planned.stdout)["layout"]["launch"]
    print(f"run  {line}", flush=True)
    line = line.replace(" OUT ", f" {out} ").replace(" --layout", " --nic lo --layout")
    submitted = read_by(["bash", "-c", f"cd {folder} && {line}"], **environment)
    assert submitted.returncode == 0, submitted.stderr
    (job,) = re.findall(r"Submitted batch job (\d+)", submitted.stdout)
    url, began = "http://127.0.0.1:8000", time.monotonic()
    while not _answers(f"{url}/health"):
        state = read_by(["squeue", "--noheader", "--job", job, "--format", "%T"]).stdout.strip()
        if state not in ("PENDING", "RUNNING") or time.monotonic() - began > 420:
            raise RuntimeError(f"{state}: {(folder / f'slurm-{job}.out').read_text()[-3000:]}")
        time.sleep(1)
    server, prompts = Server(url), prompts_of(MODEL)
    answers = [server.answer("awq", prompt) for prompt in prompts]
    found = judge(out, prompts, answers, int8=False, mixture=False)
    assert found.mixture_passed(rounded=False, least=MAX_TOKENS * len(prompts) / 2), found
    assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 401
    read_by(["scancel", f"{job}.0"])
    for _ in range(60):
        if not read_by(["squeue", "--noheader", "--job", job]).stdout.strip():
            break
        time.sleep(1)
    else:
        raise RuntimeError("the job goes on without one of its boxes")
    print(f"ok   two boxes of Slurm served, and ended together: {found}", flush=True)


def _answers(url):
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def main(venv, vllm):
    failed = passed = 0
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)):
        folder = Path(name)
        serves_from_two_boxes(folder, vllm)
        config = tiny_config(num_attention_heads=32, n_routed_experts=32, n_group=4)
        grid = IntGrid(8, None, symmetric=True)
        model = write_packed(
            folder / "model", config, random_tensors(config), compressed_int8.FORMAT, grid
        )
        for format in FAULTS:
            files = written(model, folder, format)
            one = {"slurm": slurm, "compose": compose, "k8s": k8s}.get(format)
            told = [one(file, venv) for file in files] if one else ray(files, venv)
            for file, said in zip(files, told, strict=True):
                right = bool(said) == (file.name == "fault")
                passed, failed = passed + right, failed + (not right)
                print(
                    f"{'ok  ' if right else 'FAIL'} {format} {file.name} {said[:300]}", flush=True
                )
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
