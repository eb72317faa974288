"""What an error says to do is done, as it is printed, and the command ends well.

A case is a command that is refused, and after the arrow what its error says to do, one way after
the other: `--option value` in place of the one given, `no --option` without it, `quantkit COMMAND`
or the same one typed otherwise instead, and then perhaps another. A value in <> is the reader's choice; names in capitals are
files, folders and ports."""

import re
import shlex
import socket

import make_model
import pytest
import tiny_models
import uvicorn
import yaml
from commands import command
from commands import typed as typed_in_a_shell
from edited import edited
from safetensors.torch import load_file, save_file
from small_recipe import SMALL

CASES = """
quantize LLAMA --scheme awq-w4a16 --recipe SMALL --format modelopt --out NEW -> --format awq | --format compressed-tensors
quantize LLAMA --scheme rtn-w4a16 --out YOURS -> --out <NEW>
quantize LLAMA --scheme rtn-w4a16 --format compressed-tensors --out DONE -> --out <NEW> | --overwrite
quantize LLAMA --scheme int8-a8w8c16 --recipe SMALL --kv-cache int8 --out NEW -> --kv-cache fp8 | --scheme int8-a8w8c8 no --kv-cache
quantize LLAMA --scheme rtn-w4a16 --kv-cache fp8 --out NEW -> no --kv-cache | --scheme awq-w4a16 --recipe <SMALL>
quantize LLAMA --bits 1 --recipe SMALL --out NEW -> --bits 4.159
quantize MIX --scheme rtn-w4a16 --prune 1% --out NEW -> no --prune
quantize LLAMA --scheme rtn-w4a16 --prune 50% --out NEW -> no --prune
quantize LLAMA --scheme rtn-w4a16 --bits 5 --out NEW -> --scheme awq-w4a16 --recipe <SMALL> | --scheme fp4-w4a16 --recipe <SMALL>
quantize LLAMA --scheme rtn-w4a16 --group-size 7 --out NEW -> no --group-size
quantize LLAMA --scheme rtn-w4a16 --override 're:.*o_proj bits=8' --engine chitu --out NEW -> no --override | no --engine
quantize LLAMA --scheme rtn-w4a16 --override 're:.*o_proj bits=8' --format awq --out NEW -> --format compressed-tensors
quantize MIX --preset experts-only --keep attention --scheme rtn-w4a16 --out NEW -> no --keep
quantize LLAMA --bits 5 --override 'lm_head bits=8' --recipe SMALL --out NEW -> no --override | no --override --ignore <lm_head>
quantize LLAMA --scheme awq-w4a16 --read-weight 0.5 --recipe SMALL --out NEW -> --bits <5> | --size <1MB>
plan LLAMA --scheme rtn-w4a16 --devices 1x24GiB --dp 2 -> --dp 1 | no --dp
plan LLAMA --scheme rtn-w4a16 --devices 8x24GiB --layout nope -> no --layout --engine <vllm>
plan LLAMA --scheme rtn-w4a16 --devices 8x24GiB --redundant 4 -> no --redundant
quantize LLAMA --bits 5 --recipe SMALL --out DONE -> --out <NEW>
go LLAMA --devices cpu --out NEW --recipe SMALL -> --dry-run | --yes
run LLAMA --raw --max-new-tokens 2 --prompt a b -> no --prompt
run LLAMA --raw --max-new-tokens 2 --prompt a --device cuda -> --device cpu
run LLAMA --raw --max-new-tokens 2 --prompt a --cache nope -> --cache int8 | --cache fp8 | no --cache
run LLAMA --raw --max-new-tokens 2 --prompt a --backend triton -> --backend <reference> | quantkit kernels
run LLAMA --raw --max-new-tokens 2 --prompt a --count-experts NEW -> no --count-experts
run LLAMA --raw --max-new-tokens 2 --prompt a --draft-length 2 -> no --draft-length
run LLAMA --raw --max-new-tokens 2 --prompt a --dp 2 -> no --dp --tp <2>
run LLAMA --raw --max-new-tokens 2 --prompt a --collectives int8 -> no --collectives | --tp <2>
run BARE --max-new-tokens 2 --prompt a -> --raw
serve BARE --device cpu --cache nope -> --cache int8 | --cache fp8 | no --cache
serve LLAMA --device cpu --port BUSY -> --port <FREE> | --host <127.0.0.2>
serve LLAMA --device cpu --chat-template NEW -> --chat-template <JINJA> | no --chat-template
serve LLAMA --device cpu --chat-template EMPTY -> --chat-template <JINJA> | no --chat-template
serve BARE --device cpu --draft-length 1 -> no --draft-length
deploy QUANT --engine vllm --hosts 10.0.0.1 --format k8s -> no --hosts
deploy QUANT --engine vllm --draft-length 2 -> no --draft-length
deploy QUANT --engine sglang --format ray -> --format slurm
deploy PANGU --engine omni-infer -> quantkit check PANGU --engine omni-infer --repair <NEW> then deploy NEW --engine omni-infer
quantize tiny-r1 --scheme fp4-w4a16 --recipe SMALL --engine omni-infer --out NEW -> --scheme int8-a8w8c16
quantize tiny-r1 --scheme int8-a8w8c16 --recipe SMALL --format awq --engine omni-infer --out NEW -> --format compressed-tensors
quantize tiny-r1 --scheme rtn-w4a16 --format awq --engine omni-infer --out NEW -> no --format --scheme int8-a8w8c16 --recipe <SMALL>
quantize LLAMA --scheme rtn-w4a16 --engine vllm-ascend --out NEW -> --scheme int8-a8w8c16 --recipe <SMALL>
check QUANT --depth behaviour -> --source <LLAMA>
check ODD --repair DONE -> --repair <NEW>
run ODD --raw --max-new-tokens 2 --prompt a -> quantkit check ODD --repair <NEW> then run NEW --raw --max-new-tokens 2 --prompt a
ppl LLAMA -> --text <TEXT> | --sampled <tiny-math> --baseline <LLAMA> --max-tokens <4> --limit <1>
ppl LLAMA --sampled tiny-math --max-tokens 4 --limit 1 -> --baseline <LLAMA>
ppl LLAMA --text TEXT --seq-len 64 --stride 100 -> --stride 64
ppl LLAMA --text TEXT --seq-len 64 --count-experts NEW -> no --count-experts
eval LLAMA --tasks tiny-math --limit 1 --max-tokens 4 --sequential -> --baseline <LLAMA> --out <NEW>
eval LLAMA --tasks tiny-math --plan -> --accuracy <0.5> | --baseline <RUN>
eval LLAMA --tasks tiny-math --limit 1 --max-tokens 4 --format nope --out NEW -> --format evalscope
eval LLAMA --tasks tiny-math --limit 1 --max-tokens 4 --format evalscope -> --out <NEW>
eval LLAMA --tasks tiny-math --limit 1 --max-tokens 4 --judge http://127.0.0.1:9 -> no --judge
eval LLAMA --tasks tiny-math --limit 1 --max-tokens 4 --repeats 2 --temperature 0 -> --repeats 1 | --temperature <0.5>
bench LLAMA --input-len 5000 --output-len 4 --concurrency 1 --requests 1 -> --input-len <8>
bench LLAMA --input-len 8 --output-len 5000 --concurrency 1 --requests 1 -> --output-len <4>
convert QUANT NEW -> --format <gptq> | --dtype bf16
convert QUANT NEW --format modelslim -> --format gptq | --format compressed-tensors
convert QUANT DONE --format gptq -> convert QUANT <NEW> --format gptq | --overwrite
convert LLAMA NEW --format awq -> quantkit quantize LLAMA <--scheme> <rtn-w4a16> <--out> <NEW>
playground QUANT LLAMA --port BUSY -> --port <FREE>
go LLAMA --devices cpu --tasks tiny-math --dry-run -> --score
kernels --model LLAMA -> no --model
kernels --tp 2 -> no --tp
plan LLAMA --scheme nope -> plan LLAMA --scheme fp4-w4a16
inspect NEW -> inspect tiny-r1 | inspect <QUANT>
inspect QUANT --engine nope -> inspect QUANT --engine vllm
serve BARE --device cpu --tool-parser nope -> serve BARE --device cpu --tool-parser hermes
convert QUANT NEW --format nope -> convert QUANT NEW --format gptq
compare RUN -> compare RUN <RUN>
quantize LLAMA --scheme rtn-w4a16 --memory 1MB --out NEW -> --memory 0.5GiB
quantize LLAMA --preset experts-only --scheme rtn-w4a16 --out NEW -> no --preset
deploy QUANT --engine vllm --layout one-box --devices 1 --boxes 2 -> no --boxes | --boxes 1
deploy MIXQ --engine vllm --devices 3 -> --devices 1
deploy MIXQ --engine vllm --layout two-boxes --boxes 3 -> --layout one-box --boxes 1 --devices 1
place tiny-r1 --counts COUNTS --devices 3 --engine sglang -> --redundant 2
place tiny-r1 --counts COUNTS --devices 4 --redundant 100 --engine sglang -> --redundant 48
run LLAMA --raw --max-new-tokens 2 --prompt a --tp 3 -> --tp 2
serve LLAMA --device cpu --cache-tokens 10 --max-model-len 500 -> --cache-tokens <512> | --max-model-len <32>
convert QUANT NEW --dtype int3 -> convert QUANT NEW --dtype bf16
regrade YOURS -> regrade <RUN>
deploy QUANT --engine vllm --format nope -> deploy QUANT --engine vllm --format slurm
run NEW --raw --prompt a --max-new-tokens 2 -> run tiny-r1 --raw --prompt a --max-new-tokens 2
needle LLAMA --lengths 10 --out NEW -> --lengths <2000>
"""


def write_llama(path):
    """A layer, with a chat template."""
    return tiny_models.write(path, "llama", num_hidden_layers=1, architectures=["LlamaForCausalLM"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What the names in capitals stand for."""
    folder = tmp_path_factory.mktemp("remedies")
    made = {
        **{name: write_llama(folder / name.lower()) for name in ("LLAMA", "BARE", "ODD")},
        "MIX": make_model.random_dense(folder / "mix", num_hidden_layers=2, **make_model.NARROW),
    }
    for name in ("YOURS", "QUANT", "DONE", "RUN", "MIXQ", "COUNTS"):
        made[name] = folder / name.lower()
    made |= {"TEXT": folder / "text.txt", "SMALL": folder / "small.yaml"}
    with edited(made["BARE"] / "tokenizer_config.json") as settings:
        settings["chat_template"] = None
    odd = next(made["ODD"].glob("*.safetensors"))
    (made["ODD"] / "model.safetensors.index.json").unlink()
    tensors = {name.replace("up_proj", "w3"): one for name, one in load_file(odd).items()}
    save_file(tensors, made["ODD"] / "model.safetensors")
    odd.unlink()
    made["TEXT"].write_text("one who asks is told what many have found\n\n" * 200)
    recipe = {"scheme": "awq-w4a16", "methods": ["gptq"], "calibration": str(made["TEXT"])}
    made["SMALL"].write_text(yaml.safe_dump(SMALL | recipe))
    made |= {"JINJA": folder / "own.jinja", "EMPTY": folder / "empty.jinja"}
    made["JINJA"].write_text("{{ messages[0].content }}")
    made["EMPTY"].write_text(" \n")
    made["PANGU"] = tiny_models.write(folder / "pangu", "pangu_ultra_moe")
    made["YOURS"].mkdir()
    (made["YOURS"] / "notes").write_text("mine")
    for source, name in (("LLAMA", "QUANT"), ("LLAMA", "DONE"), ("MIX", "MIXQ")):
        given = f"{made[source]} --scheme rtn-w4a16 --out {made[name]}"
        assert not typed_in_a_shell(f"quantize {given}").code
    counted = f"--text {made['TEXT']} --limit 1 --count-experts {made['COUNTS']}"
    assert not typed_in_a_shell(f"ppl tiny-r1 --seq-len 64 {counted}").code
    run = f"--tasks tiny-math --limit 2 --max-tokens 4 --out {made['RUN']}"
    assert not typed_in_a_shell(f"eval tiny-r1 {run}").code
    return made


@pytest.fixture
def named(folders, monkeypatch):
    """The names, with a port in use and one that is not; servers end when they are up."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield folders | {"BUSY": other.getsockname()[1], "FREE": port}


def typed(words, named):
    """The command with what its names stand for."""
    return command(*(str(named.get(word.strip("<>"), word.strip("<>"))) for word in words))


def without(words, option):
    at = words.index(option)
    value = at + 1 < len(words) and not words[at + 1].startswith("--")
    return words[:at] + words[at + 1 + value :]


PART = re.compile(r"(no )?(--[\w-]+)(?: ((?!no --)[^- ]\S*))?")


def applied(words, fix):
    """The command with options of the fix in place of those given, or without them."""
    for no, option, value in PART.findall(fix):
        words = without(words, option) if option in words else words
        words = words if no else [*words, option, *([value] if value else [])]
    return words


def check_printed(fix, said):
    """That the error says what the fix does: options, and values that are not the reader's."""
    parts = PART.findall(fix)
    assert any(option in said for _, option, _ in parts), (fix, said)
    for no, option, value in parts:
        if no and len(parts) == 1:
            assert re.search(r"leave|without", said), (fix, said)
        elif value and not value.startswith("<"):
            assert re.search(rf"{option} (?:[\w.-]+(?:, | or ))*{value}\b", said), (fix, said)


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_a_remedy_does_what_it_says(case, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line, fixes = case.split(" -> ")
    words = shlex.split(line)
    for number, fix in enumerate(fixes.split(" | ")):
        known = named | {"NEW": tmp_path / f"new{number}"}
        refused = typed(words, known)
        assert refused.code in (1, 2), refused
        if fix.startswith("quantkit "):
            other, *then = fix.removeprefix("quantkit ").split(" then ")
            told = " ".join(str(known.get(word, word)) for word in other.split(" <")[0].split())
            assert f"quantkit {told}" in refused.error, (told, refused.error)
            lines = [one.split() for one in (other, *then)]
        elif fix.startswith(words[0]):
            lines = [shlex.split(fix)]
            new = {one for one in lines[0] if one not in words and not one.startswith("<")}
            assert all(one in refused.error for one in new), (new, refused.error)
        else:
            check_printed(fix, refused.error)
            lines = [applied(words, fix)]
        for one in lines:
            done = typed(one, known)
            assert done.code == 0 or "\nrepaired: " in done.err, (one, done.err)
