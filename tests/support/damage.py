"""Damaged checkpoints: rules that make of a good one many that anybody could hand to quantkit.

`by_rule` goes through the fields and faults one would think of; random_damage.py knows nothing of
what the files mean.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON_FILES = (
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
NAN, INFINITY = float("nan"), float("inf")
VALUES: tuple[Any, ...] = (
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


def by_rule(model: Path) -> list[Damage]:
    """Every rule on every field and file of a checkpoint."""
    shard = next(model.glob("*.safetensors")).name
    found = [
        *_config_fields(model),
        *_settings(model),
        *_texts(model),
        *_headers(model, shard),
        *_indexes(model),
        *_kinds(model, shard),
    ]
    return [*found, *_templates(model)]


def _edited(file: str, name: str, edit: Callable[[Any], object]) -> Damage:
    def apply(folder: Path) -> None:
        value = json.loads((folder / file).read_text(encoding="utf-8"))
        edit(value)
        _write(folder / file, json.dumps(value).encode())

    return Damage(f"{file}: {name}", file, apply)


def written(file: str, name: str, content: bytes) -> Damage:
    """The file with that content."""
    return Damage(f"{file}: {name}", file, lambda folder: _write(folder / file, content))


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # it may be a link to the good one
    path.write_bytes(content)


def _set(key: str, value: Any) -> Callable[[Any], object]:
    return lambda content: content.__setitem__(key, value)


def _set_inner(key: str, inner: str, value: Any) -> Callable[[Any], object]:
    return lambda content: content[key].__setitem__(inner, value)


def _removed(key: str) -> Callable[[Any], object]:
    return lambda content: content.pop(key)


def _said(value: Any) -> str:
    return repr(value)[:30].encode("unicode_escape").decode()


def _config_fields(model: Path) -> Iterator[Damage]:
    config = json.loads((model / "config.json").read_text())
    for key in (
        *config,
        "quantization_config",
        "head_dim",
        "attention_bias",
        "rope_interleave",
        "eos_token_id",
    ):
        for value in VALUES:
            yield _edited("config.json", f"{key} = {_said(value)}", _set(key, value))
        if key in config:
            yield _edited("config.json", f"without {key}", _removed(key))
    for key in ("quantization_config", "rope_scaling"):
        for inner in config.get(key) or ():
            for value in VALUES:
                yield _edited(
                    "config.json", f"{key}.{inner} = {_said(value)}", _set_inner(key, inner, value)
                )
            yield _edited(
                "config.json", f"{key} without {inner}", lambda c, k=key, i=inner: c[k].pop(i)
            )
    for method in ("awq", "compressed-tensors", "gptq", "modelopt"):
        for key in (
            "ignore",
            "modules_to_not_convert",
            "exclude_modules",
            "config_groups",
            "bits",
            "group_size",
            "format",
            "quant_algo",
        ):
            for value in VALUES[::3]:
                block = {
                    "quant_method": method,
                    "format": "pack-quantized",
                    "quant_algo": "NVFP4",
                    "bits": 4,
                    "group_size": 128,
                    key: value,
                }
                yield _edited(
                    "config.json",
                    f"{method}.{key} = {_said(value)}",
                    _set("quantization_config", block),
                )
    for kind in ("llama", "qwen2", "qwen3", "qwen3_moe", "pangu_ultra_moe", "gemma"):
        yield _edited("config.json", f"model_type = {kind}", _set("model_type", kind))


def _settings(model: Path) -> Iterator[Damage]:
    for file in ("generation_config.json", "tokenizer_config.json"):
        for key in (*json.loads((model / file).read_text()), "top_k", "chat_template"):
            for value in VALUES:
                yield _edited(file, f"{key} = {_said(value)}", _set(key, value))
    for key, value in json.loads((model / "tokenizer.json").read_text()).items():
        for other in VALUES:
            yield _edited("tokenizer.json", f"{key} = {_said(other)}", _set(key, other))
        for inner in value if isinstance(value, dict) else ():
            for other in VALUES[::2]:
                yield _edited(
                    "tokenizer.json",
                    f"{key}.{inner} = {_said(other)}",
                    lambda c, k=key, i=inner, v=other: c[k].__setitem__(i, v),
                )
    for strategy in ({"Fixed": 10**12}, "BatchLongest"):
        padding = {
            "strategy": strategy,
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
        yield _edited("tokenizer.json", f"padding = {strategy}", _set("padding", padding))


def _texts(model: Path) -> Iterator[Damage]:
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


def _headers(model: Path, shard: str) -> Iterator[Damage]:
    content = (model / shard).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]

    def rewritten(name: str, edit: Callable[[dict[str, Any]], object]) -> Damage:
        changed = copy.deepcopy(header)
        edit(changed)
        text = json.dumps(changed).encode()
        return written(shard, name, len(text).to_bytes(8, "little") + text + data)

    for name in names[:: max(len(names) // 6, 1)]:
        for key in ("dtype", "shape", "data_offsets"):
            for value in VALUES:
                yield rewritten(
                    f"{name}.{key} = {_said(value)}",
                    lambda h, n=name, k=key, v=value: h[n].__setitem__(k, v),
                )
        for dtype in ("F64", "F32", "F16", "F8_E4M3", "F4", "I8", "BOOL", "U8"):
            yield rewritten(
                f"{name} is {dtype}", lambda h, n=name, d=dtype: h[n].__setitem__("dtype", d)
            )
        for value in VALUES[::3]:
            yield rewritten(
                f"{name} = {_said(value)}", lambda h, n=name, v=value: h.__setitem__(n, v)
            )
        yield rewritten(
            f"{name} flat", lambda h, n=name: h[n].__setitem__("shape", [_product(h[n]["shape"])])
        )
        yield rewritten(f"{name} turned", lambda h, n=name: h[n]["shape"].reverse())
        yield rewritten(
            f"{name} in 70 dimensions",
            lambda h, n=name: h[n].__setitem__("shape", [1] * 69 + h[n]["shape"]),
        )
        for other in (
            "",
            "x",
            "\ud800",
            "a\nb",
            "x" * 100_000,
            "[/x]",
            "model.layers.0.mlp.gate.weight",
        ):
            yield rewritten(
                f"{name} as {_said(other)}", lambda h, n=name, o=other: h.__setitem__(o, h.pop(n))
            )
        yield rewritten(f"without {name}", lambda h, n=name: h.pop(n))
    for value in VALUES[::2]:
        yield rewritten(
            f"__metadata__ = {_said(value)}", lambda h, v=value: h.__setitem__("__metadata__", v)
        )
    for count in (0, 1, length - 1, length + 1, 2**20, 99_999_999, 100_000_001, 2**40, 2**64 - 1):
        yield written(shard, f"header of {count}", count.to_bytes(8, "little") + content[8:])
    for part in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        yield written(shard, f"{part} bytes", content[:part])
    yield written(shard, "one byte more", content + b"\0")
    for name, text in {
        "deep": DEEP.encode(),
        "UTF-16": json.dumps(header).encode("utf-16"),
        "pickle": b"\x80\x04\x95",
        "list": b"[]",
    }.items():
        yield written(shard, f"header {name}", len(text).to_bytes(8, "little") + text + data)
    for size in (99_000_000, 10**10):
        yield Damage(
            f"{shard}: sparse {size}", shard, lambda folder, s=size: _sparse(folder / shard, s)
        )


def _product(shape: list[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _sparse(path: Path, size: int) -> None:
    _write(path, min(size - 8, 99_999_999).to_bytes(8, "little"))
    os.truncate(path, size)


def _indexes(model: Path) -> Iterator[Damage]:
    file = "model.safetensors.index.json"
    first = next(iter(json.loads((model / file).read_text())["weight_map"]))
    bad = (
        "/etc/passwd",
        "../x.safetensors",
        "..",
        ".",
        "",
        "x" * 300 + ".safetensors",
        "a\0.safetensors",
        "\ud800.safetensors",
        "x/../y.safetensors",
    )
    for shard in (*bad, "ghost.safetensors", "config.json", "a\nb.safetensors"):
        yield _edited(
            file, f"names {_said(shard)}", lambda c, s=shard: c["weight_map"].__setitem__(first, s)
        )
    for value in VALUES:
        yield _edited(
            file,
            f"shard = {_said(value)}",
            lambda c, v=value: c["weight_map"].__setitem__(first, v),
        )
        yield _edited(file, f"weight_map = {_said(value)}", _set("weight_map", value))
    for name in ("", "ghost.weight", "\ud800", "x" * 100_000, "a\nb"):
        yield _edited(
            file,
            f"lists {_said(name)}",
            lambda c, n=name: c["weight_map"].__setitem__(n, c["weight_map"][first]),
        )
    yield _edited(file, "leaves one out", lambda c: c["weight_map"].pop(first))
    yield _edited(file, "no weight_map", _removed("weight_map"))


def _kinds(model: Path, shard: str) -> Iterator[Damage]:
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


def _link_out(path: Path, model: Path) -> None:
    good = model / path.name
    os.symlink(good if good.exists() else model / "config.json", path)


def _replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def _templates(model: Path) -> Iterator[Damage]:
    for template in TEMPLATES:
        content = template.encode(errors="surrogatepass")
        yield written("chat_template.jinja", _said(template), content)
        yield _edited(
            "tokenizer_config.json", f"template {_said(template)}", _set("chat_template", template)
        )
    for content in (
        b"\xff\xfe{{ messages }}",
        b"\x80",
        "{{ messages }}".encode("utf-16"),
        b"x" * (17 << 20),
        b"\xef\xbb\xbf{{ messages[0].content }}",
    ):
        yield written("chat_template.jinja", _said(content), content)
    for said in (
        [],
        [{}],
        [{"name": "default"}],
        [{"name": 1, "template": "x"}],
        ["x"],
        {"default": "x"},
        [{"name": "x", "template": "x"}],
    ):
        yield _edited(
            "tokenizer_config.json", f"templates {_said(said)}", _set("chat_template", said)
        )


def copied(model: Path, folder: Path) -> Path:
    """A folder of hard links to a checkpoint's files; a damage replaces the file it is done to."""
    shutil.copytree(model, folder, copy_function=os.link)
    return folder
