"""Every launch is whole and uses options its engine defines; memory is what the headers say."""

import json
import math
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from block_heads import MODELS, write_with_head
from commands import typed
from make_model import random_tensors, tiny_config, write_dense
from packed_model import write_packed
from quantized import quantized
from refused import refused
from small_recipe import SMALL
from tiny_models import CONFIGS
from tiny_models import random_tensors as of_any

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.formats import awq, compressed_int8, gptq
from quantkit.checkpoint.reader import Checkpoint
from quantkit.deploy.launch import Network, deploy
from quantkit.engines.layouts import find_topology, recipes
from quantkit.engines.memory import ParallelSizes, check_split, find_split_problem, fit
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.schemes import find_scheme
from quantkit.models.stored_parameters import read_model

GIB = 2**30
DATA = Path(__file__).parents[1] / "support"
LAUNCHES = [
    (recipe.engine, recipe.device, layout.name) for recipe in recipes() for layout in recipe.layouts
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
def test_commands_are_whole_and_ask_for_a_key(int8, engine, device, layout):
    """With options that the engine defines; servers listen where they must, and start nothing
    without a key."""
    made = deploy(int8, engine, layout=layout, device=device)
    errors = [one.problem for one in made.problems if one.severity == "error"]
    assert not [problem for problem in errors if "share" not in problem]
    servers = [launch for launch in made.launches if launch.role != "router"]
    assert len({launch.box for launch in servers}) == len(servers)
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
        check_listening(launch, "127.0.0.1" if len(made.launches) == 1 else launch.box)
    for found in ranks.values():
        assert found == [str(rank) for rank in range(len(found))]
    json.dumps(made.as_dict())


def check_listening(launch, where):
    script = launch.script()
    serves = [line for line in script.splitlines() if re.search("--host |Router", line)]
    assert "0.0.0.0" not in script
    assert bool(serves) == (launch.key is not None)
    for line in serves:
        assert f"--host {where}" in line or f'host="{where}"' in line
        asks = line.removesuffix(" &").endswith('--api-key "$QUANTKIT_API_KEY"')
        assert asks or re.search("(VLLM|OPENAI)_API_KEY", script)
    if serves:
        head = script[: script.index("\n", script.index("QUANTKIT_API_KEY:?"))]
        started = ["bash", "-c", f"{head}\necho started"]
        without = subprocess.run(started, capture_output=True, text=True, env={})
        assert (without.stdout, "QUANTKIT_API_KEY: set it" in without.stderr) == ("", True)


def test_addresses_and_quantization_options(int8):
    hosts = ["10.0.0.1", "10.0.0.2"]
    two = deploy(int8, "vllm", boxes=2, network=Network(hosts, "bond0"))
    worker = two.launches[1].script()
    for part in ("--headless", "--node-rank 1 --master-addr 10.0.0.1", "IFNAME=bond0"):
        assert part in worker
    given, alone = (
        deploy(int8, "vllm", network=Network(own)).launches[0].script() for own in (hosts[:1], None)
    )
    assert "--host 10.0.0.1 " in given
    assert "VLLM_HOST_IP=10.0.0.1" in given
    assert not re.search("box0|eth0", alone.replace("on box0", "")), "what it may not have"
    assert "--quantization w8a8_int8" in deploy(int8, "sglang").launches[0].script()
    assert "--quantization" not in deploy(int8, "sglang", device="npu").launches[0].script()


def test_questions_without_an_answer(int8):
    for engine, asked, told in (
        ("vllm", {"boxes": 3}, "no layout of 3 boxes"),
        ("vllm", {"boxes": 2, "network": Network(["a"])}, "needs 2 boxes and 1 hosts"),
        ("vllm", {"boxes": 2, "network": Network(["a", "a"])}, "a is given for two boxes"),
        ("chitu", {}, "no deployment recipe for chitu"),
        ("omni-infer", {"draft_length": 1}, "omni-infer has no options for speculative decoding"),
        ("vllm-ascend", {"boxes": 4, "devices": 3}, "groups of 4"),
        ("vllm-ascend", {"layout": "one-box", "boxes": 2}, "one-box is a layout of"),
        ("vllm-ascend", {"layout": "four-boxes", "boxes": 1}, "four-boxes is a layout of"),
    ):
        with refused(told):
            deploy(int8, engine, **asked)
    for nic in ("eth0; reboot", "", "a/b"):
        with refused(f"'{nic}' is not a network interface; give one"):
            Network(nic=nic)
    assert deploy(int8, "vllm", network=Network(nic="^docker,lo")).launches


def test_a_checkpoint_without_a_tokenizer_is_reported(int8, tmp_path):
    """`inspect` and `deploy` go by headers, and a server ends with a traceback."""
    without = shutil.copytree(int8, tmp_path / "without")
    (without / "tokenizer.json").unlink()
    for path, severities in ((int8, []), (without, ["warning"])):
        problems = deploy(path, "vllm").problems
        assert [one.severity for one in problems if "tokenizer" in one.problem] == severities


def test_memory_is_counted_from_headers(int8):
    checkpoint = Checkpoint.open(int8)

    def fitted(*sizes, tokens=100, **more):
        return fit(checkpoint, ParallelSizes(*sizes, **more), tokens, 1.0, 1.0, 0.0)

    main = [one for one in checkpoint.tensors.values() if ".layers.3." not in one.name]
    stored = sum(tensor.nbytes for tensor in main)
    experts = sum(tensor.nbytes for tensor in main if ".experts." in tensor.name)
    one, eight = fitted(1), fitted(8)
    assert one.weight_bytes == stored
    assert one.cache_bytes_per_token == (128 + 16) * 2 * 3
    assert one.tokens == (GIB - stored) // one.cache_bytes_per_token
    replicated = fitted(10**9).weight_bytes
    assert eight.weight_bytes == pytest.approx(replicated + (stored - replicated) / 8, rel=1e-6)
    assert eight.cache_bytes_per_token == one.cache_bytes_per_token, "the latent is whole"
    spread = fitted(1, data=12, expert=True)
    assert spread.weight_bytes == stored - experts + math.ceil(32 / 12) * experts // 32
    assert stored / 2 < fitted(1, pipeline=2).weight_bytes < stored
    assert not fitted(1, tokens=10**9).fits


def test_heads_and_layers_come_out_even(int8, tmp_path):
    """Their rows may divide where heads do not: vLLM refuses such ranks. A key-value head may be
    held by several."""
    made = deploy(int8, "vllm", layout="two-boxes", boxes=5, devices=1)
    assert "has 3 layers, fewer than 5 pipeline stages" in str(made.refusal)
    config = CONFIGS["qwen3"] | {"num_attention_heads": 12, "num_key_value_heads": 3}
    few = packed(tmp_path / "few", config, of_any(config))
    found = {ranks: deploy(few, "vllm", devices=ranks).refusal for ranks in (1, 2, 3, 6)}
    assert [ranks for ranks, told in found.items() if told is not None] == [2]
    assert "3 key-value heads, which 2 ranks cannot share" in str(found[2])


def test_a_split_that_does_not_divide_is_named(tmp_path):
    checkpoint = Checkpoint.open(awq_of(tmp_path))
    model = read_model(checkpoint)
    assert check_split(checkpoint, model, ParallelSizes(1)) == []
    told = check_split(checkpoint, model, ParallelSizes(2))[0].problem
    assert "input channels, which 2 ranks cannot share in steps of 128" in told
    whole = [row for row in model.rows if row.expert is not None]
    found = find_split_problem(whole, lambda _: None, lambda _: 0, ParallelSizes(7))
    assert found.remedy == "use fewer tensor-parallel ranks, or a layout with expert parallelism"


def test_a_bias_after_a_sum_over_ranks_is_not_split(tmp_path):
    """gpt-oss and openPangu-Embedded have o_proj.bias."""
    config = CONFIGS["gpt_oss"]
    path = packed(tmp_path / "int8", config, of_any(config))
    assert "model.layers.0.self_attn.o_proj.bias" in Checkpoint.open(path).tensors
    assert deploy(path, "vllm", devices=2).launches


def remedied(model, engine, options):
    """The refusal of a command, which writes nothing to stdout, and what the remedy that it names
    prints."""
    refused = typed(f"deploy {model} --engine {engine} {options}")
    assert (refused.code, refused.out) == (1, "")
    remedy = re.search(r"; (leave out --hosts and )?(?:give|use) (--.+)$", refused.error.strip())
    assert remedy is not None, refused.error
    words = f"{options} {remedy[2]}".split()
    changed = dict(zip(words[::2], words[1::2]))
    if remedy[1]:
        del changed["--hosts"]
    served = typed(f"deploy {model} --engine {engine} {' '.join(map(' '.join, changed.items()))}")
    assert served.code == 0, served.err
    return refused.error, served.out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--devices 64", "32 attention heads, which 64 ranks cannot share evenly"),
        ("--devices 1x{SMALL}GiB --context 4096", "no room for a request of 4096 tokens"),
        ("--devices 1x4.5GiB --context 163840", "no room for a request of 163840 tokens"),
        ("--context 163841", "accepts texts of 163840 tokens"),
        ("--layout prefill-decode --devices 64", "which 64 ranks cannot share"),
    ],
)
def test_a_remedy_works_as_it_is_printed(int8, options, problem):
    """YaRN extends what it begins with, whatever max_position_embeddings says."""
    held = deploy(int8, "vllm").memory["server"].weight_bytes / GIB
    small = f"{(4 + 0.75 * held) / 0.9:.6f}"
    told, served = remedied(int8, "vllm", options.replace("{SMALL}", small))
    assert problem in told
    assert "vllm serve" in served


@pytest.mark.parametrize(
    "boxes",
    [
        "--boxes 2 --devices 2",
        "--boxes 2 --devices 1 --hosts 10.0.0.1,10.0.0.2",
        "--layout two-boxes --boxes 3 --devices 1 --hosts 10.0.0.1,10.0.0.2,10.0.0.3",
        "--layout two-boxes --devices 2",
    ],
)
def test_a_tied_head_is_not_apart_from_its_embedding(tmp_path, boxes):
    """SGLang's second stage has no embedding; vLLM's has a copy."""
    config = {**CONFIGS["llama"], "tie_word_embeddings": True, "num_hidden_layers": 3}
    tensors = {name: one for name, one in of_any(config).items() if name != "lm_head.weight"}
    path = packed(tmp_path / "int8", config, tensors)
    assert typed(f"deploy {path} {boxes} --engine vllm").code == 0
    told, served = remedied(path, "sglang", boxes)
    assert "the head is tied to the embedding" in told
    assert ("--pp-size" in served, served.count("launch_server")) == (False, 1)


def test_a_format_that_another_tool_must_write(tmp_path, int8):
    """The remedy converts where the engine then loads the result, and quantizes the source by any
    of the schemes that it names elsewhere."""
    config = tiny_config(num_nextn_predict_layers=0)
    grid = IntGrid(4, 32, symmetric=True)
    format = next(one for one in gptq.FORMATS if one.holds(grid))
    tensors = random_tensors(config)
    source = write_dense(tmp_path / "source", config, tensors)
    stored = write_packed(tmp_path / "gptq", config, tensors, format, grid)
    for engine in ("vllm", "sglang", "vllm-ascend", "omni-infer"):
        refused = typed(f"deploy {stored} --engine {engine}")
        found = re.search(r"quantkit (convert .+)$", refused.error.strip())
        if refused.code and found:
            assert typed(found[1].replace("OUT", f"{tmp_path}/{engine}")).code == 0
            assert typed(f"deploy {tmp_path}/{engine} --engine {engine}").code == 0
        elif refused.code:
            again = re.search(rf"quantkit quantize SRC --engine {engine} (.+)$", refused.error)
            assert again is not None
            for scheme in re.split(", | or ", again[1].removeprefix("--scheme ")):
                out = tmp_path / f"{engine}-{scheme}"
                calibrated = find_scheme(scheme).weight.has_input_scales
                recipe = Recipe(scheme=scheme, methods=("gptq",) if calibrated else (), **SMALL)
                quantized(source, out, recipe, engine=engine)
                assert typed(f"deploy {out} --engine {engine}").code == 0


def test_no_scheme_is_named_for_a_model_that_the_engine_does_not_run(tmp_path):
    tensors = of_any(CONFIGS["qwen2"])
    stored = write_packed(
        tmp_path / "awq", CONFIGS["qwen2"], tensors, awq.FORMAT, IntGrid(4, 64, False)
    )
    for engine, named in (("omni-infer", False), ("vllm-ascend", True)):
        refused = typed(f"deploy {stored} --engine {engine}")
        assert refused.code == 1
        assert ("--scheme" in refused.error) == named


def test_devices_of_one_box(int8, dense):
    """The fewest by default; tensor parallel over as many as are given, or groups that share the
    experts, and what each holds is counted so."""
    held = deploy(int8, "vllm").memory["server"].weight_bytes / GIB
    made = deploy(int8, "vllm", memory_gib=(4 + 0.75 * held) / 0.9, context=64)
    assert 1 < made.devices_per_box <= 4
    assert made.ready
    size = "--tensor-parallel-size"
    for path, layout, devices, option, value in (
        (int8, None, None, size, "1"),
        (dense, None, None, size, "1"),
        (int8, None, 8, size, "8"),
        (int8, "one-box-experts", 4, "--data-parallel-size", "4"),
    ):
        ((_, words),) = deploy(path, "vllm", layout=layout, devices=devices).launches[0].commands
        assert after(words, option) == [value]
        assert ("--enable-expert-parallel" in words) == (layout is not None)
    for layout, more, fewer, times in ((None, 8, 2, 1.5), ("one-box-experts", 4, 2, 1)):
        few, many = (
            deploy(int8, "vllm", layout=layout, devices=devices).memory["server"].weight_bytes
            for devices in (fewer, more)
        )
        assert few > times * many


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"boxes": 2, "devices": 2}, {"tensor": "2", "pipeline": "2"}),
        ({"boxes": 4, "devices": 2}, {"tensor": "1", "data": "8"}),
        ({"boxes": 2, "devices": 2, "layout": "four-boxes"}, {"tensor": "1", "data": "4"}),
        ({"boxes": 3, "devices": 8, "layout": "two-boxes"}, {"tensor": "8", "pipeline": "3"}),
    ],
)
def test_many_boxes(int8, asked, sizes):
    """Tensor parallel inside each box, as many data-parallel groups as there are devices for, or
    pipeline stages where there are none, and no rank left over."""
    boxes = asked["boxes"]
    launches = deploy(int8, "vllm", **asked).launches
    assert len(launches) == boxes
    for number, launch in enumerate(launches):
        ((_, words),) = launch.commands
        named = [f"--{way}-parallel-size" for way in sizes]
        assert after(words, *named) == [*sizes.values()]
        first = int(sizes.get("data", 0)) // boxes * number
        if first:
            assert after(words, "--data-parallel-start-rank") == [str(first)]
        if "pipeline" in sizes:
            assert after(words, "--nnodes", "--node-rank") == [str(boxes), str(number)]


@pytest.mark.parametrize(("engine", "device", "layout"), LAUNCHES)
def test_commands_are_for_the_given_machines_and_model(dense, engine, device, layout):
    """SGLang's boxes, and the sizes that prefill and decode know of each other, were those of the
    recipe whatever was asked for. vLLM ends with "Number of experts in the model must be greater
    than 0 when expert parallelism is enabled"."""
    own = find_topology(engine, None, layout, device).devices_per_box
    devices = 8 if own == 16 else 16
    chosen = find_topology(engine, None, layout, device, devices)
    made = deploy(dense, engine, layout=layout, device=device, devices=devices)
    assert f" {devices}" in made.summary
    boxes = {role.name: str(role.boxes) for role in chosen.roles}
    sizes = {
        role.name: {"dp_size": role.data_parallel, "tp_size": role.tensor_parallel}
        for role in chosen.roles
    }
    for launch in made.launches:
        for _, command in launch.commands:
            if "--nnodes" in command:
                assert after(command, "--nnodes") == [boxes[launch.role]]
            if any(word.startswith("--num-gpus=") for word in command):
                assert f"--num-gpus={devices}" in command
            if "--kv-transfer-config" in command:
                told = json.loads(*after(command, "--kv-transfer-config"))
                assert told.get("kv_connector_extra_config", sizes) == sizes
            assert not re.search(r"--(enable-expert|ep-|moe|deepep)", " ".join(command))
            assert not {"deepep", "auto", "normal", "low_latency"} & set(command), (
                "a value without its option"
            )
    assert not [note for note in made.notes if "$" in note]


@pytest.mark.parametrize("ends", [0, 3])
def test_commands_of_a_box_end_together(int8, tmp_path, ends):
    """A data-parallel engine that is left waits for the one that ended, and says nothing."""
    launches = deploy(int8, "vllm-ascend", layout="disaggregated-a2").launches
    script = next(launch.script() for launch in launches if len(launch.commands) == 8)
    program, pids = tmp_path / "vllm", tmp_path / "pids"
    program.write_text(
        f'#!/bin/bash\necho $$ >> {pids}\n[[ "$*" == *"--data-parallel-rank 5 "* ]] || exec sleep '
        "60\n"
        f"while [ $(wc -l < {pids}) -lt 8 ]; do sleep 0.05; done\nexit {ends}\n"
    )
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "QUANTKIT_API_KEY": "k"}
    assert subprocess.run(["bash", "-c", script], env=environment, timeout=30).returncode == ends
    started = [Path(f"/proc/{pid}") for pid in pids.read_text().split()]
    assert len(started) == 8
    until = time.monotonic() + 10
    while any(one.exists() for one in started):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_speculation(int8, tmp_path):
    """With the MTP layer, which takes memory, or a DSpark head: by options of its own, in layouts
    that engines run it in, and up to its block."""
    named = [f"--speculative-{one}" for one in ("algorithm", "num-steps", "eagle-topk")]
    mtp = dict(zip((*named, "--speculative-num-draft-tokens"), ["NEXTN", "2", "1", "3"]))
    block = {named[0]: "DSPARK", "--speculative-dspark-block-size": "2"}
    head = write_with_head(tmp_path / "head", MODELS["deepseek_v41"])
    for path, method, options in ((int8, "mtp", mtp), (head, "dspark", block)):
        ((_, command),) = deploy(path, "vllm", draft_length=2).launches[0].commands
        told = json.loads(*after(command, "--speculative-config"))
        assert told == {"method": method, "num_speculative_tokens": 2}
        for device in ("cuda", "npu"):
            made = deploy(path, "sglang", device=device, draft_length=2)
            ((_, command),) = made.launches[0].commands
            assert {word for word in command if "--speculative" in word} == options.keys()
            assert after(command, *options) == [*options.values()]
        assert options.keys() <= OPTIONS["sglang"]
    alone, guessing = (
        deploy(int8, "vllm", devices=1, draft_length=guesses).memory["server"] for guesses in (0, 1)
    )
    stored = Checkpoint.open(int8).tensors.values()
    more = sum(tensor.nbytes for tensor in stored if ".layers.3." in tensor.name)
    assert guessing.weight_bytes == alone.weight_bytes + more
    assert guessing.cache_bytes_per_token * 3 == alone.cache_bytes_per_token * 4
    without = packed(tmp_path / "int8", tiny_config(num_nextn_predict_layers=0))
    rounded = quantized(head, tmp_path / "awq", Recipe(scheme="rtn-w4a16", methods=()), "awq").out
    for path, engine, asked, told in (
        (without, "vllm", {}, "has no MTP layer"),
        (rounded, "vllm", {}, "vllm does not load the layers of .* that draft in awq"),
        (head, "vllm-ascend", {}, "recipe of vllm-ascend has no options for the DSpark draft head"),
        (head, "vllm", {"layout": "two-boxes"}, "in the layout two-boxes; .*--layout one-box"),
        (
            head,
            "vllm",
            {"draft_length": 5},
            "drafts . tokens a step .* give at most ., or leave out",
        ),
    ):
        with refused(told):
            deploy(path, engine, **({"draft_length": 2} | asked))
