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
from commands import typed
from make_model import random_tensors, tiny_config
from packed_model import write_packed

from quantkit.checkpoint.formats import compressed_int8
from quantkit.common.errors import QuantkitError
from quantkit.deploy.launch import deploy
from quantkit.engines.layouts import find_recipe, find_topology
from quantkit.engines.profiles import Device
from quantkit.grids.int_groups import IntGrid

RECIPES: list[tuple[str, Device]] = [
    ("vllm", "cuda"),
    ("sglang", "cuda"),
    ("sglang", "npu"),
    ("vllm-ascend", "npu"),
    ("omni-infer", "npu"),
]
LAUNCHES = [
    (engine, device, layout.name)
    for engine, device in RECIPES
    for layout in find_recipe(engine, device).layouts
]
ODD = 'it\'s $HOME "a" `b`; \\n -x'
KEY = "a 'key' of $HOME"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def programs(tmp_path: Path) -> Path:
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
    for name in ("vllm", "python", "ray", "bash"):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return folder


@pytest.mark.parametrize(("engine", "device", "layout"), LAUNCHES)
def test_the_engine_gets_every_word_as_it_was_meant(
    odd: Path, programs: Path, engine: str, device: Device, layout: str
) -> None:
    made = deploy(odd, engine, layout=layout, device=device)
    launch = made.launches[-1]
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "QUANTKIT_API_KEY": KEY,
        "COMMANDS": str(len(launch.commands)),
    }
    ended = subprocess.run(
        ["/bin/bash", "-c", launch.script()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not ended.stderr
    called = [json.loads(file.read_text()) for file in (programs.parent / "called").glob("*.json")]
    asks = [launch.key, KEY] if launch.key and launch.key.startswith("-") else []
    meant = [[*words, *(asks if launch.listens in words else [])] for _, words in launch.commands]
    assert sorted(words for words, _ in called) == sorted(meant)
    for words, seen in called:
        own = next(told for told, command in launch.commands if [*command] == words[: len(command)])
        assert own.items() <= seen.items()
        if launch.key and not asks:
            assert seen[launch.key] == KEY


@pytest.mark.parametrize(("engine", "device", "layout"), LAUNCHES)
def test_ipv6_addresses_have_brackets_before_a_port(
    odd: Path, engine: str, device: Device, layout: str
) -> None:
    """SGLang 0.5.23 (utils/network.py) refuses fd00::1:5000; an address by itself has no
    brackets."""
    boxes = find_topology(engine, name=layout, device=device).boxes
    hosts = [f"fd00::{box + 1:x}" for box in range(boxes)]
    made = deploy(odd, engine, layout=layout, device=device, hosts=hosts)
    for launch in made.launches:
        for environment, words in launch.commands:
            for told in (*words, *environment.values()):
                if told != str(odd) and "fd00::" in told:
                    bare = re.sub(r"\[fd00::\w+\]:?", "", told)
                    assert not [host for host in hosts if f"{host}:" in bare], told


def test_what_is_no_address_of_a_box(odd: Path) -> None:
    for host in ("-x", "", ".", "fd00::1::2", "10.0.0.256", "[fd00::1]", "a b"):
        with pytest.raises(QuantkitError, match="is not an address of a box"):
            deploy(odd, "vllm", hosts=[host])
    with pytest.raises(
        QuantkitError,
        match=r"0\.0\.0\.0 is not an address that other boxes can reach; give the address that the "
        r"box has",
    ):
        deploy(odd, "vllm", boxes=2, hosts=["0.0.0.0", "10.0.0.2"])
    assert "--host 0.0.0.0 " in deploy(odd, "vllm", hosts=["0.0.0.0"]).launches[0].script()


def test_a_model_is_called_by_its_own_name(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` has none, and a hub's folder is called by a number."""
    shutil.copytree(odd, tmp_path / "v3")
    os.symlink("v3", tmp_path / "current")
    monkeypatch.chdir(tmp_path / "v3")

    def named(model: str) -> str:
        (launch,) = typed(f"deploy {model} --engine vllm --json").json["launches"]
        words = launch["commands"][0][1]
        return words[words.index("--served-model-name") + 1]

    assert [named(model) for model in (".", "./", "../v3/", "../current")] == [
        "v3",
        "v3",
        "v3",
        "current",
    ]
