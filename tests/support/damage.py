"""Damaged checkpoints: rules that make of a good one many that anybody could hand to quantkit.

`by_rule` goes through the fields and faults one would think of; random_damage.py knows nothing of
what the files mean.
"""

import copy
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

JSON_FILES = (
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
NAN, INFINITY = float("nan"), float("inf")
VALUES = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        3,
        7,
        1_000_000,
        2**31,
        2**63,
        10**400,
        0.5,
        -0.5,
        1e-320,
        1e300,
        NAN,
        INFINITY,
        -INFINITY,
    ),
    *(
        "",
        "x",
        "3",
        "auto",
        "\ud800",
        "a\nb",
        "[/x]",
        "x" * 5000,
        [],
        [0],
        [1, "x"],
        ["x"],
        {},
        {"x": 1},
        [[]],
        [None],
    ),
)
GONE = object()
SHARDS = (
    *("/etc/passwd", "../x.safetensors", "..", ".", "", "x" * 300 + ".safetensors"),
    *("a\0.safetensors", "\ud800.safetensors", "x/../y.safetensors", "ghost.safetensors"),
    *("config.json", "a\nb.safetensors"),
)
NAMES = ("", "x", "\ud800", "a\nb", "x" * 100_000, "[/x]", "model.layers.0.mlp.gate.weight")
DEEP = "[" * 100_000 + "]" * 100_000
TEMPLATES = (
    "{{ 1 / 0 }}",
    "{{ messages[9] ['content'] }}",
    "{{ messages.x.y }}",
    "{{ undefined_thing() }}",
    "{{ raise_exception('no') }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{% set x = 'a' * 10**8 %}{{ x }}{{ x }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor "
    "%}{{ ns.s }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ range(10**9) | list }}",
    "{{ (range(99999) | list) * 99999 }}",
    "{{ range(99999) | sum * range(99999) | join }}",
    "{{ lipsum(n=10**7) }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% include 'config.json' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends 'x' %}",
    "{% for %}",
    "{{ messages",
    "{% if true %}",
    "{% endif %}",
    "{% nonsense %}",
    "{{ 'x' | nonsense }}",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "{{ messages | tojson(indent=10**9) }}",
    "{{ messages | tojson(indent='x' * 10**9) }}",
    "{{ strftime_now('%Y' * 10**7) }}",
    "{{ strftime_now(5) }}",
    "{% generation %}x",
    "{{ 'x' | indent(10**9) }}{{ 'x' | wordwrap(0) }}",
    "{% set x = [] %}{{ x.append(1) }}",
    "\ud800",
    "",
    "no messages at all",
    "{{ messages[0]['content'] }}",
)


@dataclass(frozen=True)
class Damage:
    """What is done to a folder, and the file it is done to."""

    name: str
    file: str
    apply: Callable[[Path], object]


def by_rule(model):
    """Every rule on every field and file of a checkpoint."""
    shard = next(model.glob("*.safetensors")).name
    return [
        *(damage for file in JSON_FILES for damage in _fields(model, file)),
        *_quantizations(),
        *_texts(model),
        *_headers(model, shard),
        *_kinds(model, shard),
        *_templates(),
    ]


def written(file, name, content):
    """The file with that content."""
    return Damage(f"{file}: {name}", file, lambda folder: _write(folder / file, content))


def _write(path, content):
    path.unlink(missing_ok=True)  # it may be a link to the good one
    path.write_bytes(content)


def _edited(file, name, edit):
    def apply(folder):
        value = json.loads((folder / file).read_text(encoding="utf-8"))
        edit(value)
        _write(folder / file, json.dumps(value).encode())

    return Damage(f"{file}: {name}", file, apply)


def _set(value, *path):
    """An edit that gives the field at a path a value, or takes it away for the value GONE."""

    def edit(content):
        *above, last = path
        for key in above:
            content = content[key]
        if value is GONE:
            del content[last]
        else:
            content[last] = value

    return edit


def _said(value):
    return repr(value)[:30].encode("unicode_escape").decode()


def _edits(content):
    """Every field, and the first twelve of each inner object, with every value and without one."""
    for key, value in content.items():
        inner = islice(value, 12) if isinstance(value, dict) else ()
        for path in ((key,), *((key, one) for one in inner)):
            for other in (*VALUES, GONE):
                yield f"{'.'.join(path)} = {_said(other)}", _set(other, *path)


def _fields(model, file):
    content = json.loads((model / file).read_text())
    for name, edit in _edits(content):
        yield _edited(file, name, edit)
    added = ("quantization_config", "head_dim", "attention_bias", "rope_interleave", "top_k")
    for key in {*added, "eos_token_id", "chat_template", "padding"} - content.keys():
        for value in VALUES:
            yield _edited(file, f"{key} = {_said(value)}", _set(value, key))
    if "weight_map" in content:
        first = next(iter(content["weight_map"]))
        for shard in SHARDS:
            yield _edited(file, f"names {_said(shard)}", _set(shard, "weight_map", first))
        for name in NAMES:
            place = content["weight_map"][first]
            yield _edited(file, f"lists {_said(name)}", _set(place, "weight_map", name))


def _quantizations():
    lists = ("ignore", "modules_to_not_convert", "exclude_modules", "config_groups")
    for method in ("awq", "compressed-tensors", "gptq", "modelopt"):
        said = {"quant_method": method, "format": "pack-quantized", "quant_algo": "NVFP4"}
        for key in (*lists, "bits", "group_size", "format", "quant_algo"):
            for value in VALUES[::3]:
                block = {**said, "bits": 4, "group_size": 128, key: value}
                edit = _set(block, "quantization_config")
                yield _edited("config.json", f"{method}.{key} = {_said(value)}", edit)
    for kind in ("llama", "qwen2", "qwen3", "qwen3_moe", "pangu_ultra_moe", "gemma"):
        yield _edited("config.json", f"model_type = {kind}", _set(kind, "model_type"))


def _texts(model):
    """The same faults in every JSON file."""
    for file in JSON_FILES:
        good = (model / file).read_bytes()
        text = good.decode()
        for part in (1, 2, 3, 5, 9):
            yield written(file, f"{part} tenths", good[: len(good) * part // 10])
        for name, content in {
            "empty": b"",
            "blank": b" \n",
            "zeros": bytes(100),
            "a byte order mark": b"\xef\xbb\xbf" + good,
            "UTF-16": text.encode("utf-16"),
            "not UTF-8": good[:-1] + b',"x":"\xff\xfe"}',
            "a list": b"[" + good + b"]",
            "a number": b"3",
            "null": b"null",
            "nested deep": DEEP.encode(),
            "nested deep in a key": good.rstrip()[:-1] + b',"x":' + DEEP.encode() + b"}",
            "nested 900": good.rstrip()[:-1] + b',"x":' + b"[" * 900 + b"]" * 900 + b"}",
            "a key twice": good.rstrip()[:-1] + b',"x":1,"x":2}',
            "a long number": good.rstrip()[:-1] + b',"x":' + b"9" * 10_000 + b"}",
            "more after it": good + good,
            "half a character": good.rstrip()[:-1] + b',"x":"\\ud800"}',
            "16 MiB": good.rstrip()[:-1] + b',"x":"' + b"x" * (17 << 20) + b'"}',
        }.items():
            yield written(file, name, content)


def _headers(model, shard):
    content = (model / shard).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    some = {name: header[name] for name in names[:: max(len(names) // 6, 1)]}

    def rewritten(name, edit):
        changed = copy.deepcopy(header)
        edit(changed)
        text = json.dumps(changed).encode()
        return written(shard, name, len(text).to_bytes(8, "little") + text + data)

    for name, edit in _edits({"__metadata__": {}, **some}):
        yield rewritten(name, edit)
    for name, entry in some.items():
        shape = entry["shape"]
        for other in ([math.prod(shape)], shape[::-1], [1] * 69 + shape):
            yield rewritten(f"{name} is {other[:3]}", _set(other, name, "shape"))
        for dtype in ("F64", "F32", "F16", "F8_E4M3", "F4", "I8", "BOOL", "U8"):
            yield rewritten(f"{name} is {dtype}", _set(dtype, name, "dtype"))
        for other in NAMES:
            yield rewritten(
                f"{name} as {_said(other)}", lambda h, n=name, o=other: h.__setitem__(o, h.pop(n))
            )
    for count in (0, 1, length - 1, length + 1, 2**20, 99_999_999, 100_000_001, 2**40, 2**64 - 1):
        yield written(shard, f"header of {count}", count.to_bytes(8, "little") + content[8:])
    for part in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        yield written(shard, f"{part} bytes", content[:part])
    yield written(shard, "one byte more", content + b"\0")
    for text in (DEEP.encode(), json.dumps(header).encode("utf-16"), b"\x80\x04\x95", b"[]"):
        whole = len(text).to_bytes(8, "little") + text + data
        yield written(shard, f"header {_said(text)}", whole)
    for size in (99_000_000, 10**10):
        yield Damage(
            f"{shard}: sparse {size}", shard, lambda folder, s=size: _sparse(folder / shard, s)
        )


def _sparse(path, size):
    _write(path, min(size - 8, 99_999_999).to_bytes(8, "little"))
    os.truncate(path, size)


def _kinds(model, shard):
    """Something else than a file, or a file elsewhere."""
    for file in (
        *JSON_FILES,
        shard,
        "chat_template.jinja",
        "LICENSE",
        "hf_quant_config.json",
        "special_tokens_map.json",
    ):
        for name, make in {
            "pipe": os.mkfifo,
            "directory": os.mkdir,
            "broken link": lambda path: os.symlink("nowhere", path),
            "link to itself": lambda path: os.symlink(path.name, path),
            "link to a device": lambda path: os.symlink("/dev/zero", path),
            "link out": lambda path: _link_out(path, model),
            "link up and back": lambda path: os.symlink(
                os.path.relpath("/etc/hostname", path.parent), path
            ),
            "gone": lambda path: None,
        }.items():
            yield Damage(
                f"{file}: {name}", file, lambda folder, f=file, m=make: _replaced(folder / f, m)
            )


def _link_out(path, model):
    good = model / path.name
    os.symlink(good if good.exists() else model / "config.json", path)


def _replaced(path, make):
    path.unlink(missing_ok=True)
    make(path)


def _templates():
    file, key = "tokenizer_config.json", "chat_template"
    texts = [template.encode(errors="surrogatepass") for template in TEMPLATES]
    for content in (*texts, b"\xff\xfe{{ messages }}", b"\x80", b"x" * (17 << 20)):
        yield written("chat_template.jinja", _said(content), content)
    some = [{"name": "default"}], [{"name": 1, "template": "x"}], [{"name": "x", "template": "x"}]
    for said in (*TEMPLATES, [{}], *some, {"default": "x"}):
        yield _edited(file, f"template {_said(said)}", _set(said, key))


def copied(model, folder):
    """A folder of hard links to a checkpoint's files; a damage replaces the file it is done to."""
    shutil.copytree(model, folder, copy_function=os.link)
    return folder
