"""A printed script starts the engine with the words that were meant, whatever the path, the name
and the addresses have in them."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import command, typed
from make_model import random_tensors, tiny_config
from packed_model import write_packed
from refused import refused

from quantkit.checkpoint.formats import compressed_int8
from quantkit.deploy.formats import find_format
from quantkit.deploy.launch import Network, deploy
from quantkit.engines.layouts import find_topology, recipes
from quantkit.grids.int_groups import IntGrid

LAUNCHES = [
    (recipe.engine, recipe.device, layout.name) for recipe in recipes() for layout in recipe.layouts
]
ODD = 'it\'s $HOME "a" `b`; \\n -x'
KEY = "a 'key' of $HOME"
Call = tuple[list[str], dict[str, str]]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    config = tiny_config(num_attention_heads=32, n_routed_experts=32, n_group=4)
    path = tmp_path_factory.mktemp("models") / ODD
    return write_packed(
        path,
        config,
        random_tensors(config),
        compressed_int8.FORMAT,
        IntGrid(8, None, symmetric=True),
    )


@pytest.fixture
def programs(tmp_path):
    """Programs that write down how they were called, one JSON object each, in `tmp_path`/called;
    servers stay until all COMMANDS were."""
    folder, called = tmp_path / "bin", tmp_path / "called"
    folder.mkdir()
    called.mkdir()
    text = f"""#!{sys.executable}
import json, os, pathlib, sys, time
name, file = os.path.basename(sys.argv[0]), os.path.join({str(called)!r}, str(os.getpid()))
with open(file + ".new", "w") as new:
    json.dump([[name, *sys.argv[1:]], dict(os.environ)], new)
os.rename(file + ".new", file + ".json")
until = time.monotonic() + 30
def missing():
    return len(list(pathlib.Path({str(called)!r}).glob("*.json"))) < int(os.environ["COMMANDS"])
while name != "ray" and missing() and time.monotonic() < until:
    time.sleep(0.02)
"""
    for name in ("vllm", "python", "python3", "ray", "bash"):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def called_by(script, programs, commands, **environment):
    """The words and the environment of each program that a script runs."""
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "QUANTKIT_API_KEY": KEY}
    ended = subprocess.run(
        ["/bin/bash", "-c", script],
        env={**variables, "COMMANDS": str(commands), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not ended.stderr
    files = (programs.parent / "called").glob("*.json")
    return [(words, seen) for words, seen in map(json.loads, map(Path.read_text, files))]


def check_calls(launch, called, filled=str):
    asks = [launch.key, KEY] if launch.key and launch.key.startswith("-") else []
    meant = [
        [*map(filled, words), *(asks if launch.listens in words else [])]
        for _, words in launch.commands
    ]
    assert sorted(words for words, _ in called) == sorted(meant)
    for words, seen in called:
        own = next(
            told
            for told, command in launch.commands
            if [*map(filled, command)] == words[: len(command)]
        )
        assert {name: filled(value) for name, value in own.items()}.items() <= seen.items()
        if launch.key and not asks:
            assert seen[launch.key] == KEY


@pytest.mark.parametrize(("engine", "device", "layout"), LAUNCHES)
def test_the_engine_gets_every_word_as_it_was_meant(odd, programs, engine, device, layout):
    """SGLang 0.5.23 (utils/network.py) refuses fd00::1:5000; an address by itself has no
    brackets."""
    boxes = find_topology(engine, name=layout, device=device).boxes
    hosts = [f"fd00::{box + 1:x}" for box in range(boxes)]
    made = deploy(odd, engine, layout=layout, device=device, network=Network(hosts))
    for launch in made.launches:
        for environment, words in launch.commands:
            for told in {*words, *environment.values()} - {str(odd)}:
                bare = re.sub(r"\[fd00::\w+\]:?", "", told)
                assert not [host for host in hosts if f"{host}:" in bare], told
    launch = made.launches[-1]
    check_calls(launch, called_by(launch.script(), programs, len(launch.commands)))


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("vllm", "prefill-decode"),
        ("vllm", "four-boxes"),
        ("vllm-ascend", "disaggregated-a2"),
    ],
)
@pytest.mark.parametrize("format", ["compose", "k8s", "slurm"])
def test_other_formats_run_the_same_commands(odd, programs, format, engine, layout):
    asked = find_format(format, hosts=False)
    made = deploy(odd, engine, layout=layout, network=Network(scheduled=asked.scheduled))
    (text,), launch = asked.write(made), made.launches[-1]
    read = {"compose": read_compose, "k8s": read_k8s, "slurm": read_slurm}[format]
    script, boxes = read(text, made, launch, programs)
    called = called_by(script, programs, len(launch.commands), **boxes)
    installs = [["python3", "-m", "pip", "--quiet", "install", launch.package]]
    expected = installs if launch.package and format != "slurm" else []
    assert [one for one, _ in called if "pip" in one] == expected

    def filled(word):
        return re.sub(r"QUANTKIT_BOX_(\d+)", r"10.0.0.\1", word)

    check_calls(launch, [one for one in called if "pip" not in one[0]], filled)


def read_compose(text, made, launch, programs):
    """What runs of a launch: its script, and variables that the format fills in."""
    service = list(yaml.safe_load(text)["services"].values())[-1]
    assert service["volumes"][0]["target"] == made.model
    return service["command"][0].replace("$$", "$"), {}


def read_k8s(text, made, launch, programs):
    pods = [one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment"]
    assert len(pods) == len({one.box for one in made.launches})
    containers = [[*pod["spec"]["template"]["spec"]["containers"]] for pod in pods]
    assert sum(map(len, containers)) == len(made.launches)
    own = containers[int(launch.box.removeprefix("QUANTKIT_BOX_"))]
    (container,) = [one for one in own if one["name"] == launch.role]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert [box for box, value in given.items() if value is None][-1] == launch.box
    boxes = {box: f"10.0.0.{box.rpartition('_')[2]}" for box in given if "BOX" in box}
    return container["command"][2], boxes


def read_slurm(text, made, launch, programs):
    shutil.copy(programs / "python", programs / "srun")
    helpers = (
        "scontrol() { [ $2 = hostnames ] && seq -f node%g 0 99 ||"
        ' echo "NodeName=$3 NodeAddr=10.0.0.${3#node} a=b"; }\n'
        'getent() { echo "$2 STREAM"; echo "$2 DGRAM"; }\n'
    )
    steps = called_by(helpers + text, programs, len(made.launches))
    for called in (programs.parent / "called").iterdir():
        called.unlink()
    name = f"launch_{len(steps) - 1}"
    ((words, seen),) = [step for step in steps if step[0][-1] == name]
    assert f"--nodelist=node{launch.box.removeprefix('QUANTKIT_BOX_')}" in words
    script = f"{name}() {seen[f'BASH_FUNC_{name}%%'].removeprefix('()')}\n{name}"
    return script, {one: seen[one] for one in seen if one.startswith("QUANTKIT_BOX")}


def test_what_a_format_does_not_start(odd):
    for line, told in (
        ("--engine vllm --format yaml", "choose one of sh, compose, k8s, ray, slurm"),
        ("--engine vllm --format slurm --hosts a", "leave out --hosts"),
        ("--engine omni-infer --format k8s", "give --format sh or --format slurm"),
        ("--engine sglang --format ray", "Ray Serve starts vLLM, not sglang; give --format slurm"),
    ):
        refused = command("deploy", str(odd), *line.split())
        assert (refused.code, refused.out, told in refused.error) == (2, "", True), refused.error


def test_what_is_no_address_of_a_box(odd):
    for host in ("-x", "", "http://10.0.0.1:80", "fd00::1::2", "10.0.0.256", "[fd00::1]", "a b"):
        with refused("is not an address of a box"):
            deploy(odd, "vllm", network=Network([host]))
    with refused(r"0\.0\.0\.0 is not an address that other boxes can reach"):
        deploy(odd, "vllm", boxes=2, network=Network(["0.0.0.0", "node-2.local"]))
    alone = deploy(odd, "vllm", network=Network(["0.0.0.0"])).launches[0]
    assert "--host 0.0.0.0 " in alone.script()


def test_a_model_is_called_by_its_own_name(odd, tmp_path, monkeypatch):
    """`.` has none, and a hub's folder is called by a number."""
    shutil.copytree(odd, tmp_path / "v3")
    os.symlink("v3", tmp_path / "current")
    monkeypatch.chdir(tmp_path / "v3")
    for model, name in ((".", "v3"), ("../v3/", "v3"), ("../current", "current")):
        (launch,) = typed(f"deploy {model} --engine vllm --json").json["launches"]
        words = launch["commands"][0][1]
        assert words[words.index("--served-model-name") + 1] == name
