"""Engines' own loaders as judges, on a CPU: every parameter of a model of theirs must come whole
out of our checkpoint, and mean the same.

    make test-loaders            # makes the environments, then: python tests/judges/loaders/judge.py --vllm-ascend PYTHON --sglang PYTHON

Released packages build their model class, create the parameters of each quantization method, read
checkpoints that `quantkit quantize` wrote, as rank 0 and rank 3 of 4, and lay the weights out for
the device; operators of the device are stand-ins. Judged: no tensor that no parameter takes, no
parameter that is not written, and codes, zero points and scales equal to ours (`compare.py`). Then
each kind of fault is made in a checkpoint of every format - a tensor renamed, transposed, missing,
and with one value changed - and must be found.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
RESULT = ROOT / "recipes" / "engines" / "loaded.json"
for folder in (HERE.parent.parent, HERE.parent, HERE):
    sys.path.insert(0, str(folder))

import tiny_models
import torch
from compare import Rank, faults
from dense_models import DENSE, EXPERTS, random_weights
from make_model import CONFIGS, write_dense
from safetensors.torch import load_file, save_file

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.formats import awq
from quantkit.engines.profiles import Device, choose, find_engine
from quantkit.grids.int_groups import IntWeight
from quantkit.grids.schemes import find_scheme
from quantkit.quantization import quantize

LOADED = CONFIGS["loaded"]
WIDTHS = {"moe_intermediate_size": 512, "intermediate_size": 1024}  # groups of 128 over four ranks


def _as_released(family):
    """The tiny model with sizes that kernels ask for, and keys of the release that an engine has
    another default for."""
    tiny, own = tiny_models.CONFIGS[family], LOADED[family]
    text = {**tiny.get("text_config", {}), **own.get("text_config", {})}
    return {**tiny, **own, **({"text_config": text} if text else {})}


MODELS = {
    "deepseek_v3": {**EXPERTS["deepseek_v3"], **WIDTHS},
    "pangu_ultra_moe": {**EXPERTS["pangu_ultra_moe"], **WIDTHS},
    "qwen3_moe": {**EXPERTS["qwen3_moe"], **WIDTHS, "num_attention_heads": 8},
    "qwen3": {**DENSE["qwen3"], **WIDTHS, "num_attention_heads": 8},
    **{family: _as_released(family) for family in LOADED},
}
RANKS = (Rank(0, 4), Rank(3, 4))
DEVICES = {
    "vllm": ("cuda",),
    "vllm-ascend": ("npu",),
    "sglang": ("cuda",),
}
RELEASES = {"vllm": "0.33.0", "vllm-ascend": "0.23.0", "sglang": "0.5.23"}
DAMAGES = ("renamed", "transposed", "missing", "changed")


@dataclass(frozen=True)
class Case:
    engine: str
    device: Device
    scheme: str
    format: str
    model: str
    plugin: bool = False
    """Whether the engine loads it by quantkit's plugin alone."""

    @property
    def name(self):
        by = ", by the plugin" if self.plugin else ""
        return f"{self.engine} {self.device}, {self.scheme} {self.format}, {self.model}{by}"

    @property
    def kind(self):
        """What one entry of the result file is about."""
        return self.engine, self.device, self.scheme, self.format, self.plugin, ranks(self.model)

    @property
    def chosen(self):
        return choose(self.engine, find_scheme(self.scheme), device=self.device, format=self.format)

    def written(self, directory):
        way = f"{self.engine}-plugin" if self.plugin else self.engine
        return directory / f"{self.model}-{way}-{self.device}-{self.scheme}-{self.format}"


SCHEMES = [
    tuple(line.split())
    for line in """
awq-w4a16 awq
awq-w4a16 compressed-tensors
int8-a8w8c16 compressed-tensors
fp4-w4a16 modelopt
fp4-w4a16 compressed-tensors
int8-a8w8c16 modelslim
int8-a8w8c8 modelslim
int4-w4a8 modelslim
w8a16 compressed-tensors
""".strip().splitlines()
]
# What an engine has no class for, or, vLLM's, which it does not make without torchvision and the
# driver of a GPU (libcuda) or its attention.
WITHOUT = {
    "sglang": ("pangu_ultra_moe",),
    "vllm": ("pangu_ultra_moe", "glm5_next", "qwen4_exp", "hy_v4"),
}
# Linears in groups that vllm-ascend takes by quantkit's plugin, and for which engine they are written: int4 with zero points and without,
# int8, and AWQ's layout with its experts.
PLUGIN = {
    ("awq-w4a16", "compressed-tensors", "qwen3"): "vllm",
    ("awq-w4a16", "compressed-tensors", "deepseek_v3"): "sglang",
    ("w8a16", "compressed-tensors", "qwen3"): None,
    ("awq-w4a16", "awq", "qwen3"): None,
    ("awq-w4a16", "awq", "deepseek_v3"): None,
}
EXPERTS_ONLY = (("vllm-ascend", "awq-w4a16"), ("vllm-ascend", "int4-w4a8"), ("sglang", "int4-w4a8"))
# Parameters that are made and not stored. Offsets of symmetric weights and the order of inputs
# (g_idx) in compressed-tensors, in ModelOpt's layout the scales of activations and of an 8-bit
# cache: no product of such a checkpoint reads them. Scales to be laid out anew are filled later.
# vllm-ascend has parameters for scales of queries and values of latents, and uses those of keys
# alone.
UNUSED = {
    "vllm": r"\.((w13_|w2_)?(weight_(g_idx|shape)|input_(global_)?scale)|[qkv]_(scale|zero_point)|prob_scale) ",
    "vllm-ascend": r"\.((w13_|w2_)?weight_offset|fa_[qv]\.(scale|offset)|[kv]_cache_offset) ",
    "sglang": r"\.(ngram_embedding\.weight|"
    r"(w13_|w2_)?(weight_)?(input_scale|blockscale_swizzled|g_idx|g_idx_sort_indices)|attn(_mqa|_mha)?\.[kv]_scale) ",
}


def ranks(model):
    """Of a recurrence, whose heads lie side by side in one tensor, the only one."""
    return (Rank(0, 1),) if "text_config" in MODELS[model] else RANKS


def cases(engine):
    for device in DEVICES[engine]:
        for scheme, format in SCHEMES:
            loads = [
                load
                for load in find_engine(engine).loads
                if load.format == format and device in load.devices and _holds(load, scheme)
            ]
            for model in MODELS if loads else ():
                if model in LOADED and not _takes(find_engine(engine), model, loads):
                    continue
                codes = find_scheme(scheme).cache
                nothing = model == "qwen3" and (engine, scheme) in EXPERTS_ONLY
                nothing = nothing or (
                    codes is not None and model not in find_engine(engine).caches.get(codes, ())
                )
                if model not in WITHOUT.get(engine, ()) and not nothing:
                    yield Case(engine, device, scheme, format, model)
    if engine == "vllm-ascend":
        for scheme, format, model in PLUGIN:
            yield Case(engine, "npu", scheme, format, model, plugin=True)


def _takes(profile, model, loads):
    """Whether the engine has the model and takes it by one of the rules."""
    names = {name for load in loads for name in (load.format, f"{load.format} {load.variant}")}
    listed = profile.formats.get(model, names)
    return model in profile.architectures and bool(names & {*listed})


def _holds(load, scheme):
    wanted = find_scheme(scheme).weight.engine_name
    return wanted in load.grids or (wanted == "int4-asymmetric" and "int4-symmetric" in load.grids)


def write(case, directory):
    drafts = case.plugin or find_engine(case.engine).loads_drafts(
        case.model, case.format, case.chosen.rule.variant, block=False
    )
    source = directory / f"{case.model}{'' if drafts else '-without-drafts'}-source"
    out = case.written(directory)
    if not source.exists():
        config = deepcopy(MODELS[case.model])
        if not drafts:
            config.get("text_config", config)["num_nextn_predict_layers"] = 0
        drawn = tiny_models.random_tensors if case.model in LOADED else random_weights
        write_dense(source, config, drawn(config))
    if not (out / "config.json").exists():
        # Loaders read what was written, whatever it was written from: rounded to nearest, but
        # for the steps of a cache, which calibration finds.
        scheme = find_scheme(case.scheme)
        asked = replace(scheme, methods=("gptq",) if scheme.cache else ())
        recipe = Recipe(scheme=case.scheme, samples=8, held_out=2, seq_len=64)
        asked_for = PLUGIN[case.scheme, case.format, case.model] if case.plugin else case.engine
        options = {"engine": asked_for, "device": "cpu"}
        quantize(source, out, asked, case.format, recipe, **options)
        if case.plugin and case.format == "awq":
            quantize_kv_b(out)
    return out


def quantize_kv_b(path):
    """As AutoAWQ has W_UK and W_UV, and quantkit has not: in int4 too."""
    rng = torch.Generator().manual_seed(0)
    for shard in path.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in [name for name in tensors if name.endswith(".kv_b_proj.weight")]:
            n, k = tensors.pop(name).shape
            codes, points = (
                torch.randint(-8, 8, (n, of), generator=rng).char() for of in (k, k // 128)
            )
            scale = (torch.rand(n, k // 128, generator=rng) / 64).half().float()
            weight = IntWeight(codes, scale, points, 4)
            tensors |= awq.FORMAT.pack(name.removesuffix(".weight"), weight)
        save_file(tensors, shard, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].remove("self_attn.kv_b_proj")
    (path / "config.json").write_text(json.dumps(config))


def damaged(path, damage, name):
    """A copy of the checkpoint with a fault in one tensor."""
    copy = shutil.copytree(path, path.with_name(f"{path.name}-{damage}-{name}"), dirs_exist_ok=True)
    (copy / "model.safetensors.index.json").unlink(missing_ok=True)
    for shard in sorted(copy.glob("*.safetensors")):
        tensors = load_file(shard)
        if name not in tensors:
            continue
        tensor = tensors.pop(name)
        if damage == "renamed":
            tensors[f"{name}_"] = tensor
        elif damage == "transposed":
            tensors[name] = tensor.t().contiguous()
        elif damage == "changed":
            tensors[name] = tensor.clone()
            tensors[name].reshape(-1).view(torch.uint8)[-1] ^= 1
        save_file(tensors, shard, metadata={"format": "pt"})
    return copy


def job(case, path, rank):
    launch = () if case.plugin else case.chosen.rule.launch
    asked = dict(zip(launch[::2], launch[1::2])).get("--quantization")
    out = path.with_name(f"{path.name}.rank{rank.number}")
    return {
        "path": str(path),
        "rank": rank.number,
        "of": rank.of,
        "device": case.device,
        "quantization": asked,
        "plugin": case.plugin,
        "out": str(out),
    }


def run(engine, python, jobs):
    loader = HERE / f"{engine.replace('-', '_')}_loader.py"
    for device in sorted({job["device"] for job in jobs}):
        asked = json.dumps([job for job in jobs if job["device"] == device])
        with Path(f"{jobs[0]['out']}.{device}.log").open("w") as log:
            subprocess.run(
                [python, str(loader), device],
                input=asked,
                text=True,
                stdout=log,
                stderr=log,
                check=True,
            )


def verdict(engine, job, judged):
    """What is wrong with what the engine loaded, held against the checkpoint at `judged`."""
    told = json.loads(Path(job["out"] + ".json").read_text())
    if "error" in told:
        return [told["error"]]
    unused = re.compile(UNUSED.get(engine, r"(?!)"))
    found = [
        f"{parameter}: not written in full"
        for parameter in told["untouched"]
        if not unused.search(parameter)
    ]
    pieces = {
        name: piece
        for name, piece in load_file(job["out"] + ".safetensors").items()
        if not unused.search(f"{name.split('|')[0]} ")
    }
    return found + faults(judged, pieces, Rank(job["rank"], job["of"]), told["unread"])


def targets(path, damages):
    """What to damage, and how: each tensor that one expert's weight is stored as."""
    tensors = {
        name: tensor
        for shard in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }
    within = {
        name: tensor
        for name, tensor in tensors.items()
        if re.search(r"\.1\.(mlp|ffn)\.(experts\.3\.)?(down_proj|w2)\.", name)
    }
    within |= {name: tensor for name, tensor in tensors.items() if ".1.self_attn.fa_k." in name}
    read = {
        name: tensor
        for name, tensor in within.items()
        if not name.endswith(("shape", "offset", "input_scale"))
    }
    return [
        (name, damage)
        for name, tensor in read.items()
        for damage in damages
        if damage != "transposed" or tensor.numel() > 1
    ]


def judge(engine, python, directory, asked):
    """Whether each case was loaded right, by rank."""
    whole = {
        (case, rank): job(case, write(case, directory), rank)
        for case in asked
        for rank in ranks(case.model)
    }
    run(engine, python, list(whole.values()))
    right = {}
    for (case, rank), asked_of in whole.items():
        found = verdict(engine, asked_of, case.written(directory))
        right[case, rank] = not found
        print(
            f"{'FAIL' if found else 'ok  '} {case.name}, rank "
            f"{rank.number}{': ' if found else ''}{'; '.join(found[:3])}",
            flush=True,
        )
    return right


def controls(engine, python, directory, asked):
    """Whether each fault that was made in a checkpoint of each format was found: in every tensor of
    one expert's weight, of models with names of their own a changed value."""
    tried = {
        (case, f"{name} {damage}"): job(
            case, damaged(case.written(directory), damage, name), ranks(case.model)[-1]
        )
        for case in asked
        if case.model in ("deepseek_v3", *LOADED) or case.plugin
        for name, damage in targets(
            case.written(directory), ("changed",) if case.model in LOADED else DAMAGES
        )
    }
    run(engine, python, list(tried.values()))
    found = {}
    for (case, damage), asked_of in tried.items():
        said = verdict(engine, asked_of, case.written(directory))
        found[case, damage] = bool(said)
        print(
            f"{'ok  ' if said else 'FAIL'} {case.name}, {damage}: "
            f"{said[0][:150] if said else 'not found'}",
            flush=True,
        )
    return found


def summed(right, found):
    """The result file's entries: one for each format on one grid that the engine loads by itself, as
    some ranks."""
    entries = []
    for key in dict.fromkeys(case.kind for case, _ in right if not case.plugin):
        held = {(case, rank): good for (case, rank), good in right.items() if case.kind == key}
        made = [good for (case, _), good in found.items() if case.kind == key]
        chosen = next(case for case, _ in held).chosen
        entries.append(
            {
                "engine": key[0],
                "release": RELEASES[key[0]],
                "date": date.today().isoformat(),
                "device": key[1],
                "format": chosen.format,
                "variant": chosen.rule.variant,
                "grid": chosen.grid.engine_name,
                "models": list(dict.fromkeys(case.model for case, _ in held)),
                "ranks": f"{' and '.join(str(rank.number) for rank in key[-1])} of {key[-1][0].of}",
                "loads": len(held),
                "right": sum(held.values()),
                "faults": len(made),
                "found": sum(made),
                **({"cache": codes} if (codes := find_scheme(key[2]).cache) else {}),
            }
        )
    return entries


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vllm", help="python of an environment with vLLM 0.33.0")
    add("--vllm-ascend", help="python of an environment with vllm-ascend 0.23.0")
    add("--sglang", help="python of an environment with SGLang 0.5.23")
    add("--directory", type=Path, required=True, help="checkpoints and what was loaded; kept")
    add("--result", action="store_true", help=f"write what was found to {RESULT.relative_to(ROOT)}")
    add("--cases", default="", help="regular expression of names")
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    entries = []
    passed = []
    for engine in DEVICES:
        python = getattr(asked, engine.replace("-", "_"))
        if python:
            chosen = [case for case in cases(engine) if re.search(asked.cases, case.name)]
            right = judge(engine, python, asked.directory, chosen)
            found = controls(engine, python, asked.directory, chosen)
            entries += summed(right, found)
            passed += [*right.values(), *found.values()]
    if asked.result:
        judged = {entry["engine"] for entry in entries}
        kept = [entry for entry in json.loads(RESULT.read_text()) if entry["engine"] not in judged]
        RESULT.write_text(
            "[\n" + ",\n".join(f" {json.dumps(entry)}" for entry in kept + entries) + "\n]\n"
        )
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
