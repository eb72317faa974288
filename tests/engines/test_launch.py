"""Every launch is whole and uses options its engine defines; memory is what the headers say."""

import json
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from block_heads import MODELS, write_with_head
from commands import typed
from make_model import random_tensors, tiny_config
from packed_model import write_packed
from refused import refused
from tiny_models import CONFIGS
from tiny_models import random_tensors as of_any

from quantkit.checkpoint.formats import awq, compressed_int8, gptq
from quantkit.checkpoint.reader import Checkpoint
from quantkit.deploy.launch import Network, deploy
from quantkit.engines.layouts import find_recipe, find_topology
from quantkit.engines.memory import ParallelSizes, check_split, find_split_problem, fit
from quantkit.grids.int_groups import IntGrid
from quantkit.models.stored_parameters import read_model

GIB = 2**30
DATA = Path(__file__).parents[1] / "support"
RECIPES = [
    ("vllm", "cuda"),
    ("sglang", "cuda"),
    ("sglang", "npu"),
    ("vllm-ascend", "npu"),
    ("omni-infer", "npu"),
]
LAUNCHES = [
    (engine, device, layout)
    for engine, device in RECIPES
    for layout in (one.name for one in find_recipe(engine, device).layouts)
]

OPTIONS = {
    name: set(text.split())
    for name, text in yaml.safe_load((DATA / "deploy_options.yaml").read_text()).items()
}


INT8 = IntGrid(8, None, symmetric=True)


def packed(path, config, tensors=None):
    tensors = tensors or random_tensors(config)
    return write_packed(path, config, tensors, compressed_int8.FORMAT, INT8)


def awq_of(path):
    config, grid = tiny_config(), IntGrid(4, 128, symmetric=False)
    return write_packed(path / "awq", config, random_tensors(config), awq.FORMAT, grid)


def after(words, *options):
    """What a command says after each of these options."""
    return [words[words.index(option) + 1] for option in options]


@pytest.mark.parametrize(
    ("inputs", "devices", "float16"), [(192, 1, True), (256, 1, False), (256, 4, True)]
)
def test_awq_that_marlin_does_not_take_is_started_in_float16(tmp_path, inputs, devices, float16):
    """As vLLM 0.22.1 needs it on an H200: its other kernel of AWQ knows no bfloat16."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": inputs}
    config = CONFIGS["llama"] | sizes | {"hidden_size": 512, "head_dim": 128}
    grid = IntGrid(4, 64, symmetric=False)
    path = write_packed(tmp_path / "awq", config, of_any(config), awq.FORMAT, grid)
    made = deploy(path, "vllm", device="cuda", layout="one-box", devices=devices)
    (command,) = (command for launch in made.launches for _, command in launch.commands)
    assert ("--dtype" in command) == float16
    assert made.problems == ()
    if float16:
        assert after(command, "--dtype") == ["float16"]
        assert any("float16" in note for note in made.notes if "128" in note)


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    config = tiny_config(num_attention_heads=32, n_routed_experts=32, n_group=4)
    return packed(tmp_path_factory.mktemp("int8"), config)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    config = tiny_config(first_k_dense_replace=3, num_nextn_predict_layers=0)
    return packed(tmp_path_factory.mktemp("dense"), config)


def program(command):
    return (
        "sglang"
        if "sglang.launch_server" in command
        else command[0]
        if command[0] in ("vllm", "ray")
        else command[1]
    )


@pytest.mark.parametrize(("engine", "device", "layout"), LAUNCHES)
def test_commands_use_options_the_engine_defines(int8, engine, device, layout):
    made = deploy(int8, engine, layout=layout, device=device)
    assert not [
        problem
        for problem in made.problems
        if problem.severity == "error" and "share" not in problem.problem
    ]
    ranks = {}
    for launch in made.launches:
        for environment, command in launch.commands:
            if launch.role != "router" and program(command) != "ray":
                options = [word for word in command if word.startswith("-") and " " not in word]
                assert set(options) <= OPTIONS[program(command)]
            assert not [word for word in (*command, *environment.values()) if "$" in word]
            for word in command:
                if word.startswith("{"):
                    json.loads(word)
            if "--data-parallel-rank" in command:
                ranks.setdefault(launch.role, []).extend(after(command, "--data-parallel-rank"))
                assert "--data-parallel-size" in command
    servers = [launch for launch in made.launches if launch.role != "router"]
    assert len({launch.box for launch in servers}) == len(servers)
    for found in ranks.values():
        assert found == [str(rank) for rank in range(len(found))]
    json.dumps(made.as_dict())


def test_box_layouts_and_quantization_options(int8):
    two = deploy(int8, "vllm", boxes=2, network=Network(["10.0.0.1", "10.0.0.2"], "bond0"))
    assert two.layout == "two-boxes"
    worker = two.launches[1].script()
    assert "--headless" in worker
    assert "--node-rank 1 --master-addr 10.0.0.1" in worker
    assert "export GLOO_SOCKET_IFNAME=bond0" in worker
    assert "--quantization w8a8_int8" in deploy(int8, "sglang", device="cuda").launches[0].script()
    assert "--quantization" not in deploy(int8, "sglang", device="npu").launches[0].script()
    assert deploy(int8, "sglang").device == "cuda"


@pytest.mark.parametrize(("engine", "device", "layout"), LAUNCHES)
def test_servers_listen_where_they_must_and_ask_for_a_key(int8, engine, device, layout):
    made = deploy(int8, engine, layout=layout, device=device)
    for launch in made.launches:
        script = launch.script()
        serves = [line for line in script.splitlines() if re.search("--host |Router", line)]
        assert "0.0.0.0" not in script
        assert bool(serves) == (launch.key is not None)
        for line in serves:
            where = "127.0.0.1" if len(made.launches) == 1 else launch.box
            assert f"--host {where}" in line or f'host="{where}"' in line
            assert re.search("(VLLM|OPENAI)_API_KEY", script) or line.removesuffix(" &").endswith(
                '--api-key "$QUANTKIT_API_KEY"'
            )
        if serves:
            head = script[: script.index("\n", script.index("QUANTKIT_API_KEY:?"))]
            without = subprocess.run(
                ["bash", "-c", f"{head}\necho started"], capture_output=True, text=True, env={}
            )
            assert "QUANTKIT_API_KEY: set it" in without.stderr
            assert not without.stdout, "it starts nothing without a key"


def test_one_box_with_an_address_listens_there(int8):
    given, alone = (
        deploy(int8, "vllm", network=Network(hosts)).launches[0].script()
        for hosts in (["10.0.0.1"], None)
    )
    assert "--host 10.0.0.1 " in given
    assert "VLLM_HOST_IP=10.0.0.1" in given
    assert "box0" not in alone.replace("on box0", "")
    assert "eth0" not in alone, "an interface that the machine may not have"


def test_an_engine_that_does_not_load_the_checkpoint_is_reported(tmp_path):
    made = deploy(awq_of(tmp_path), "vllm-ascend")
    assert not made.ready
    assert "no AWQ reader" in made.problems[0].problem


def test_questions_without_an_answer(int8):
    many = {"boxes": 2, "network": Network(["10.0.0.1", "10.0.0.1"])}
    for engine, asked, told in (
        ("vllm", {"boxes": 3}, "no layout of 3 boxes"),
        ("vllm", {"boxes": 2, "network": Network(["a"])}, "needs 2 boxes and 1 hosts"),
        (
            "vllm",
            {"network": Network(["http://10.0.0.1:80"])},
            "is not an address of a box; give a name or",
        ),
        ("vllm", many, r"10\.0\.0\.1 is given for two boxes"),
        ("chitu", {}, "no deployment recipe for chitu"),
        ("omni-infer", {"draft_length": 1}, "omni-infer has no options for speculative decoding"),
    ):
        with refused(told):
            deploy(int8, engine, **asked)
    for nic in ("eth0; reboot", "", "a/b"):
        with refused(f"'{nic}' is not a network interface; give one"):
            Network(nic=nic)
    assert deploy(int8, "vllm", boxes=2, network=Network(["fe80::1", "node-2.local"])).launches
    assert deploy(int8, "vllm", network=Network(nic="^docker,lo")).launches


def test_a_longer_request_than_the_model_accepts_is_reported(tmp_path):
    """Engines refuse to start with it. YaRN extends what it begins with, whatever
    max_position_embeddings says; vLLM goes by it."""
    plain = packed(tmp_path / "plain", tiny_config(num_nextn_predict_layers=0, rope_scaling=None))
    yarn = packed(tmp_path / "yarn", tiny_config(num_nextn_predict_layers=0))

    def made(path, context):
        found = deploy(path, "vllm", devices=1, context=context)
        (length,) = after(found.launches[0].commands[0][1], "--max-model-len")
        return [one.problem for one in found.problems if one.severity == "error"], length

    for path, context, length in (
        (yarn, None, "16384"),
        (yarn, 4096 * 40, "163840"),
        (plain, None, "2048"),
    ):
        assert made(path, context) == ([], length)
    for path, most in ((yarn, 4096 * 40), (plain, 2048)):
        told = f"the model accepts texts of {most} tokens, fewer than {most + 1}"
        assert made(path, most + 1)[0] == [told]


def test_a_checkpoint_without_a_tokenizer_is_reported(int8, tmp_path):
    """`inspect` and `deploy` go by headers, and a server ends with a traceback."""
    assert not [one for one in deploy(int8, "vllm").problems if "tokenizer" in one.problem]
    without = shutil.copytree(int8, tmp_path / "without")
    (without / "tokenizer.json").unlink()
    (told,) = [one for one in deploy(without, "vllm").problems if "tokenizer" in one.problem]
    assert (told.severity, told.remedy) == ("warning", "copy it from the model's source")


def test_memory_is_counted_from_headers(int8):
    checkpoint = Checkpoint.open(int8)
    one = fit(checkpoint, ParallelSizes(1), 100, 1.0, 1.0, 0.0)
    stored = sum(
        tensor.nbytes for tensor in checkpoint.tensors.values() if ".layers.3." not in tensor.name
    )
    assert one.weight_bytes == stored
    assert one.cache_bytes_per_token == (128 + 16) * 2 * 3
    assert one.tokens == (GIB - stored) // one.cache_bytes_per_token
    eight = fit(checkpoint, ParallelSizes(8), 100, 1.0, 1.0, 0.0)
    replicated = fit(checkpoint, ParallelSizes(10**9), 100, 1.0, 1.0, 0.0).weight_bytes
    assert eight.weight_bytes == pytest.approx(replicated + (stored - replicated) / 8, rel=1e-6)
    assert eight.cache_bytes_per_token == one.cache_bytes_per_token, (
        "the latent is whole on every rank"
    )
    experts = sum(
        tensor.nbytes
        for tensor in checkpoint.tensors.values()
        if ".experts." in tensor.name and ".layers.3." not in tensor.name
    )
    spread = fit(checkpoint, ParallelSizes(1, data=12, expert=True), 100, 1.0, 1.0, 0.0)
    assert spread.weight_bytes == stored - experts + math.ceil(32 / 12) * experts // 32
    halves = fit(checkpoint, ParallelSizes(1, pipeline=2), 100, 1.0, 1.0, 0.0)
    assert stored / 2 < halves.weight_bytes < stored
    assert not fit(checkpoint, ParallelSizes(1), 10**9, 1.0, 1.0, 0.0).fits


def test_heads_and_layers_come_out_even(int8, tmp_path):
    """Their rows may divide where heads do not: vLLM refuses such ranks."""

    def told(path, devices, boxes=1):
        return str(deploy(path, "vllm", devices=devices, boxes=boxes).refusal)

    uneven = "32 attention heads, which 64 ranks cannot share evenly; give --devices 1"
    assert uneven in told(int8, 64)
    assert told(int8, 32) == "None"
    made = deploy(int8, "vllm", layout="two-boxes", boxes=5, devices=1)
    assert "has 3 layers, fewer than 5 pipeline stages" in str(made.refusal)
    config = CONFIGS["qwen3"] | {"num_attention_heads": 12, "num_key_value_heads": 3}
    few = packed(tmp_path / "few", config, of_any(config))
    assert "3 key-value heads, which 2 ranks cannot share" in told(few, 2)
    assert [told(few, devices) for devices in (1, 3, 6, 12)] == ["None"] * 4, (
        "one head is held by several ranks"
    )


def test_an_mtp_layer_for_speculation_takes_memory(int8):
    without, guessing = (
        deploy(int8, "vllm", devices=1, draft_length=guesses).memory["server"] for guesses in (0, 1)
    )
    checkpoint = Checkpoint.open(int8)
    mtp = sum(
        tensor.nbytes for tensor in checkpoint.tensors.values() if ".layers.3." in tensor.name
    )
    assert guessing.weight_bytes == without.weight_bytes + mtp
    assert guessing.cache_bytes_per_token * 3 == without.cache_bytes_per_token * 4


def test_a_split_that_does_not_divide_is_named(tmp_path):
    checkpoint = Checkpoint.open(awq_of(tmp_path))
    assert check_split(checkpoint, read_model(checkpoint), ParallelSizes(1)) == []
    told = check_split(checkpoint, read_model(checkpoint), ParallelSizes(2))[0].problem
    assert "input channels, which 2 ranks cannot share in steps of 128" in told
    whole = [row for row in read_model(checkpoint).rows if row.expert is not None]
    found = find_split_problem(whole, lambda _: None, ParallelSizes(7))
    assert found.remedy == "use fewer tensor-parallel ranks, or a layout with expert parallelism"


def test_a_bias_after_a_sum_over_ranks_is_not_split(tmp_path):
    """gpt-oss and openPangu-Embedded have o_proj.bias."""
    config = CONFIGS["gpt_oss"]
    path = packed(tmp_path / "int8", config, of_any(config))
    assert "model.layers.0.self_attn.o_proj.bias" in Checkpoint.open(path).tensors
    checkpoint = Checkpoint.open(path)
    assert check_split(checkpoint, read_model(checkpoint), ParallelSizes(2)) == []
    assert deploy(path, "vllm", devices=2).launches


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--devices 64", "32 attention heads, which 64 ranks cannot share evenly"),
        ("--devices 1x{SMALL}GiB --context 4096", "no room for a request of 4096 tokens"),
        ("--devices 1x4.5GiB --context 163840", "no room for a request of 163840 tokens"),
        ("--context 999999", "accepts texts of 163840 tokens"),
        ("--layout prefill-decode --devices 64", "which 64 ranks cannot share"),
        ("--layout two-boxes --devices 64 --boxes 2", "which 64 ranks cannot share"),
    ],
)
def test_a_remedy_works_as_it_is_printed(int8, options, problem):
    """A refusal writes nothing to stdout, and names an option that serves the model."""
    held = deploy(int8, "vllm").memory["server"].weight_bytes / GIB
    small = f"{(4 + 0.75 * held) / 0.9:.6f}"
    options, deployed = options.replace("{SMALL}", small), f"deploy {int8} --engine vllm"
    refused = typed(f"{deployed} {options}")
    assert (refused.code, refused.out) == (1, "")
    assert problem in refused.error
    remedy = re.search(r"; (?:give|use) (--.+)$", refused.error.strip())
    assert remedy is not None, refused.error
    changed = _options(options) | _options(remedy[1])
    served = typed(f"{deployed} {' '.join(map(' '.join, changed.items()))}")
    assert (served.code, "vllm serve" in served.out) == (0, True), served.err


def _options(line):
    words = line.split()
    return dict(zip(words[::2], words[1::2]))


@pytest.mark.parametrize(
    "boxes",
    [
        "--boxes 2",
        "--boxes 2 --devices 1 --hosts 10.0.0.1,10.0.0.2",
        "--layout two-boxes --boxes 3 --devices 1 --hosts 10.0.0.1,10.0.0.2,10.0.0.3",
        "--layout two-boxes",
    ],
)
def test_a_tied_head_is_not_apart_from_its_embedding(tmp_path, boxes):
    """SGLang's second stage has no embedding; vLLM's has a copy."""
    config = {**CONFIGS["llama"], "tie_word_embeddings": True, "num_hidden_layers": 3}
    tensors = {name: one for name, one in of_any(config).items() if name != "lm_head.weight"}
    path = packed(tmp_path / "int8", config, tensors)
    command = f"deploy {path} {boxes}"
    if "devices" not in boxes:
        command += " --devices 2"
    assert typed(f"{command} --engine vllm").code == 0
    refused = typed(f"{command} --engine sglang")
    assert (refused.code, refused.out) == (1, "")
    assert "the head is tied to the embedding" in refused.error
    remedy = re.search(r"; (leave out --hosts and )?give (--.+)$", refused.error.strip())
    assert remedy is not None, refused.error
    changed = _options(f"{boxes} {remedy[2]}")
    if remedy[1]:
        del changed["--hosts"]
    served = typed(f"deploy {path} --engine sglang {' '.join(map(' '.join, changed.items()))}")
    assert (served.code, "--pp-size" in served.out) == (0, False), served.err
    assert served.out.count("launch_server") == (2 if "--hosts" in changed else 1)


def test_a_format_that_another_tool_must_write(tmp_path, int8):
    """The remedy converts where the engine then loads the result, and is not offered elsewhere."""
    config = tiny_config(num_nextn_predict_layers=0)
    grid = IntGrid(4, 32, symmetric=True)
    format = next(one for one in gptq.FORMATS if one.holds(grid))
    stored = write_packed(tmp_path / "gptq", config, random_tensors(config), format, grid)
    for engine in ("vllm", "sglang", "vllm-ascend", "omni-infer"):
        refused = typed(f"deploy {stored} --engine {engine}")
        found = re.search(r"quantkit (convert .+)$", refused.error.strip())
        if refused.code and found:
            assert typed(found[1].replace("OUT", f"{tmp_path}/{engine}")).code == 0
            assert typed(f"deploy {tmp_path}/{engine} --engine {engine}").code == 0
        elif refused.code:
            assert f"quantize the source again with --engine {engine}" in refused.error


def test_the_fewest_devices_are_the_default(int8, dense):
    for path in (int8, dense):
        ((_, words),) = deploy(path, "vllm").launches[0].commands
        assert words[words.index("--tensor-parallel-size") + 1] == "1"
    held = deploy(int8, "vllm").memory["server"].weight_bytes / GIB
    made = deploy(int8, "vllm", memory_gib=(4 + 0.75 * held) / 0.9, context=64)
    assert 1 < made.devices_per_box <= 4
    assert made.ready


def test_every_fault_has_its_own_remedy(tmp_path):
    config = tiny_config(num_nextn_predict_layers=0)
    del config["topk_method"], config["scoring_func"]
    told = str(deploy(packed(tmp_path / "int8", config), "vllm", devices=1).refusal)
    assert "config.json has topk_method = None (set it to 'noaux_tc': vllm reads it)" in told
    assert told.endswith("config.json has scoring_func = None; set it to 'sigmoid': vllm reads it")


def test_one_box_of_fewer_devices(int8):
    """Tensor parallel over as many as there are, and what each holds is counted so."""
    eight, two = (deploy(int8, "vllm", devices=devices) for devices in (8, 2))
    for made, devices in ((eight, "8"), (two, "2")):
        assert after(made.launches[0].commands[0][1], "--tensor-parallel-size") == [devices]
    assert two.memory["server"].weight_bytes > 1.5 * eight.memory["server"].weight_bytes


def test_many_boxes_of_fewer_devices(int8):
    """Tensor parallel inside each box, as many data-parallel groups as there are devices for, and
    no rank left over."""
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size")
    for launch in deploy(int8, "vllm", boxes=2, devices=2).launches:
        assert after(launch.commands[0][1], *sizes) == ["2", "2"]
    ((_, command),) = deploy(int8, "vllm", boxes=4, devices=2).launches[3].commands
    groups = after(command, "--data-parallel-size", "--data-parallel-start-rank")
    assert groups == ["8", "6"]
    with refused("groups of 4"):
        deploy(int8, "vllm-ascend", boxes=4, devices=3)


def test_a_layout_on_another_number_of_boxes(int8):
    """Data-parallel groups become more or fewer, or pipeline stages where there are none."""
    two = deploy(int8, "vllm", layout="four-boxes", boxes=2, devices=2)
    commands = [launch.commands[0][1] for launch in two.launches]
    assert [after(one, "--data-parallel-size") for one in commands] == [["4"], ["4"]]
    assert after(commands[1], "--data-parallel-start-rank") == ["2"]
    for launch in deploy(int8, "vllm", layout="two-boxes", boxes=3).launches:
        sizes = after(launch.commands[0][1], "--pipeline-parallel-size", "--nnodes")
        assert sizes == ["3", "3"]
    for layout, boxes in (("two-boxes", 3), ("four-boxes", 8)):
        made = deploy(int8, "sglang", layout=layout, boxes=boxes, device="cuda")
        for number, launch in enumerate(made.launches):
            sizes = after(launch.commands[0][1], "--nnodes", "--node-rank")
            assert sizes == [str(boxes), str(number)]
    eight = find_topology("vllm-ascend", 8, "four-boxes")
    assert eight.roles[0].data_parallel == 16
    for layout, boxes in (("one-box", 2), ("four-boxes", 1), ("disaggregated-a2", 12)):
        with refused(f"{layout} is a layout of"):
            deploy(int8, "vllm-ascend", layout=layout, boxes=boxes)


@pytest.mark.parametrize(("engine", "device", "layout"), LAUNCHES)
@pytest.mark.parametrize("devices", [8, 16])
def test_commands_are_for_the_given_machines(int8, engine, device, layout, devices):
    """SGLang's boxes, and the sizes that prefill and decode know of each other, were those of the
    recipe whatever was asked for."""
    chosen = find_topology(engine, None, layout, device, devices)
    made = deploy(int8, engine, layout=layout, device=device, devices=devices)
    assert (
        devices == find_topology(engine, None, layout, device).devices_per_box
        or f" {devices}" in made.summary
    )
    sizes = {
        role.name: {"dp_size": role.data_parallel, "tp_size": role.tensor_parallel}
        for role in chosen.roles
    }
    for launch in made.launches:
        boxes = next((role.boxes for role in chosen.roles if role.name == launch.role), 1)
        for _, command in launch.commands:
            if "--nnodes" in command:
                assert command[command.index("--nnodes") + 1] == str(boxes)
            if any(word.startswith("--num-gpus=") for word in command):
                assert f"--num-gpus={devices}" in command
            if "--kv-transfer-config" in command:
                told = json.loads(command[command.index("--kv-transfer-config") + 1]).get(
                    "kv_connector_extra_config", sizes
                )
                assert told == sizes
    assert not [note for note in made.notes if "$" in note]


@pytest.mark.parametrize("ends", ["0", "3"])
def test_commands_of_a_box_end_together(int8, tmp_path, ends):
    """A data-parallel engine that is left waits for the one that ended, and says nothing."""
    script = next(
        launch
        for launch in deploy(int8, "vllm-ascend", layout="disaggregated-a2").launches
        if len(launch.commands) == 8
    ).script()
    program = tmp_path / "vllm"
    pids = tmp_path / "pids"
    program.write_text(
        f'#!/bin/bash\necho $$ >> {pids}\n[[ "$*" == *"--data-parallel-rank 5 "* ]] || exec sleep '
        "60\n"
        f"while [ $(wc -l < {pids}) -lt 8 ]; do sleep 0.05; done\nexit {ends}\n"
    )
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "QUANTKIT_API_KEY": "k"}
    ended = subprocess.run(
        ["bash", "-c", script], env=environment, timeout=30, capture_output=True, text=True
    )
    assert ended.returncode == int(ends), ended.stderr
    started = [int(pid) for pid in pids.read_text().split()]
    until = time.monotonic() + 10
    while (left := [pid for pid in started if _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(started) == 8
    assert not left


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("engine", "device", "layout"), LAUNCHES)
def test_a_model_without_experts_gets_no_expert_options(dense, engine, device, layout):
    """vLLM ends with "Number of experts in the model must be greater than 0 when expert parallelism
    is enabled"."""
    for launch in deploy(dense, engine, layout=layout, device=device).launches:
        for _, command in launch.commands:
            said = " ".join(command)
            assert not re.search(r"--(enable-expert|ep-|moe|deepep)", said)
            assert not {"deepep", "auto", "normal", "low_latency"} & set(command), (
                "a value without its option"
            )


def test_speculation_with_the_mtp_layer(int8, tmp_path):
    for engine, length in (("vllm", 2), ("vllm-ascend", 1)):
        ((_, command),) = deploy(int8, engine, draft_length=length).launches[0].commands
        (told,) = after(command, "--speculative-config")
        assert json.loads(told) == {"method": "mtp", "num_speculative_tokens": length}
    options = ("algorithm", "num-steps", "eagle-topk", "num-draft-tokens")
    named = [f"--speculative-{option}" for option in options]
    for device in ("cuda", "npu"):
        ((_, command),) = deploy(int8, "sglang", device=device, draft_length=2).launches[0].commands
        assert {word for word in command if word.startswith("--speculative-")} == set(named)
        assert after(command, *named) == ["NEXTN", "2", "1", "3"]
        assert set(named) <= OPTIONS["sglang"]
    without = packed(tmp_path / "int8", tiny_config(num_nextn_predict_layers=0))
    with refused("has no MTP layer"):
        deploy(without, "vllm", draft_length=1)


@pytest.mark.parametrize("name", MODELS)
def test_speculation_with_a_dspark_head(name, tmp_path):
    """By its own options, in layouts that engines run it in, and up to its block."""
    path = write_with_head(tmp_path / name, MODELS[name])
    ((_, command),) = deploy(path, "vllm", draft_length=2).launches[0].commands
    (told,) = after(command, "--speculative-config")
    assert json.loads(told) == {"method": "dspark", "num_speculative_tokens": 2}
    named = ["--speculative-algorithm", "--speculative-dspark-block-size"]
    for device in ("cuda", "npu"):
        ((_, command),) = deploy(path, "sglang", device=device, draft_length=2).launches[0].commands
        assert {word for word in command if word.startswith("--speculative-")} == set(named)
        assert after(command, *named) == ["DSPARK", "2"]
        assert set(named) <= OPTIONS["sglang"]
    for engine, asked, told in (
        ("vllm-ascend", {}, "recipe of vllm-ascend has no options for the DSpark draft head"),
        ("vllm", {"layout": "two-boxes"}, "in the layout two-boxes; .*--layout one-box"),
        ("sglang", {"layout": "four-boxes"}, "in the layout four-boxes"),
        ("vllm", {"draft_length": 5}, "drafts . tokens a step .* give at most ., or leave out"),
    ):
        with refused(told):
            deploy(path, engine, **({"draft_length": 2} | asked))


def test_experts_shared_by_the_devices_of_one_box(int8):
    four, two = (
        deploy(int8, "vllm", layout="one-box-experts", devices=devices) for devices in (4, 2)
    )
    ((_, command),) = four.launches[0].commands
    assert after(command, "--data-parallel-size") == ["4"]
    assert "--enable-expert-parallel" in command
    assert four.memory["server"].weight_bytes < two.memory["server"].weight_bytes
