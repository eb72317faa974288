"""Generated requests for a server: right ones, and right ones spoilt in their values, fields,
bytes, headers, paths and methods."""

import json
from dataclasses import dataclass, field, replace

from random_damage import places

from quantkit.executor.server.protocol import HARMLESS, NEUTRAL, ChatRequest, CompletionRequest
from quantkit.executor.server.responses import ResponsesRequest

KEY = "secret"
CHAT, COMPLETIONS, RESPONSES, TOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/tokenize",
)


@dataclass(frozen=True)
class Sent:
    """One request. leaves: the client goes after the first bytes of the answer."""

    method: str
    path: str
    content: bytes
    headers: dict[str, str] = field(
        default_factory=lambda: {
            "Authorization": f"Bearer {KEY}",
            "Content-Type": "application/json",
        }
    )
    leaves: bool = False


def request(draw):
    kinds = [(CHAT, _chat), (COMPLETIONS, _completion)] * 4 + [
        (RESPONSES, _response),
        (TOKENIZE, _tokenized),
    ]
    path, make = draw.choice(kinds)
    body = make(draw)
    return draw.choice(KINDS)(draw, path, body)


def _chat(draw):
    messages = [
        {"role": draw.choice(["system", "user", "assistant"]), "content": _text(draw)}
        for _ in range(draw.randint(1, 3))
    ]
    return {"messages": [*messages, {"role": "user", "content": _text(draw)}], **_common(draw)}


def _completion(draw):
    prompt = draw.choice(
        [
            _text(draw),
            [_text(draw), _text(draw)],
            [draw.randrange(300) for _ in range(5)],
            [[5, 6], [7]],
        ]
    )
    return {"prompt": prompt, **_common(draw)}


def _response(draw):
    items = draw.choice(
        [
            _text(draw) or "x",
            [{"role": "user", "content": [{"type": "input_text", "text": _text(draw)}]}],
        ]
    )
    return {
        "input": items,
        "max_output_tokens": draw.randint(1, 4),
        "stream": draw.random() < 0.5,
        "temperature": 1.0,
    }


def _tokenized(draw):
    return draw.choice(
        [
            {"prompt": _text(draw)},
            {"messages": [{"role": "user", "content": _text(draw)}], "return_token_strs": True},
        ]
    )


def _common(draw):
    body = {"max_tokens": draw.randint(1, 4)}
    optional = {
        "temperature": draw.choice([0, 0.7, 1, 100, 1e-40]),
        "top_p": draw.choice([1, 0.5, 1e-50]),
        "top_k": draw.choice([-1, 0, 1, 50, 2**31 - 1]),
        "seed": draw.choice([0, 7, 2**63 - 1, -(2**63)]),
        "n": draw.randint(1, 3),
        "stop": draw.choice(["a", ["b", "\n\n"], None]),
        "stream": draw.random() < 0.5,
        "ignore_eos": True,
        "min_tokens": 1,
        "response_format": draw.choice([{"type": "text"}, {"type": "json_object"}]),
        "guided_regex": "[a-f]{1,3}",
        "logit_bias": {"40": 5, "41": -100},
        "repetition_penalty": 1.1,
        "stop_token_ids": [5, 319],
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "stream_options": {"include_usage": True},
    }
    return body | {
        name: optional[name] for name in draw.sample(sorted(optional), draw.randint(0, 5))
    }


def _text(draw):
    return draw.choice(
        [
            "What is 2+3?",
            "ы日本語🙂",
            "<think>",
            "</s><|user|>",
            "\x00\x1b[31m",
            " " * 50,
            "a" * draw.randint(1, 200),
            "",
        ]
    )


def _value(draw):
    """Something that a field does not expect."""
    numbers = [
        2**63,
        -(2**63) - 1,
        2**31,
        10**400,
        -1,
        0,
        1.5,
        1e308,
        -1e308,
        5e-324,
        float("nan"),
        float("inf"),
        float("-inf"),
    ]
    texts = ["", "x", "1", "null", "\ud800", "a\udfff", "x" * 5000, "\x00"]
    lists = [
        [],
        [[]],
        [None],
        ["x"] * 2000,
        [0] * 3000,
        [[1]] * 400,
        [2**70],
        [{}],
        {},
        {"a": 1},
    ]
    return draw.choice(
        [None, True, False, *numbers, *texts, *lists, _nested(draw.choice([3, 300]))]
    )


def _nested(depth):
    value = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


FIELDS = sorted(
    {
        *ChatRequest.model_fields,
        *CompletionRequest.model_fields,
        *ResponsesRequest.model_fields,
        *NEUTRAL,
        *HARMLESS,
        "nonsense",
    }
)


def _right(draw, path, body):
    return Sent("POST", path, json.dumps(body).encode())


def _left(draw, path, body):
    longer = {
        "max_output_tokens" if path == RESPONSES else "max_tokens": 60,
        "stream": draw.random() < 0.7,
    }
    return replace(
        _right(draw, path, body if path == TOKENIZE else {**body, **longer}), leaves=True
    )


def _spoilt_value(draw, path, body):
    for name in draw.sample(FIELDS, draw.randint(1, 2)):
        body[name] = _value(draw)
    return _right(draw, path, body)


def _spoilt_message(draw, path, body):
    message = {
        "role": draw.choice(["user", _value(draw)]),
        "content": draw.choice([_value(draw), [{"type": "text", "text": _value(draw)}]]),
    }
    more = (
        {draw.choice(["tool_calls", "name", "reasoning_content", "x"]): _value(draw)}
        if draw.random() < 0.5
        else {}
    )
    body = {**body, "messages": [{**message, **more}]}
    if draw.random() < 0.3:
        body["chat_template_kwargs"] = {
            draw.choice(
                ["messages", "eos_token", "self", "add_generation_prompt", "tools"]
            ): _value(draw)
        }
    body.pop("prompt", None)
    return _right(draw, CHAT, body)


def _missing(draw, path, body):
    body.pop(draw.choice(sorted(body)))
    return _right(draw, path, {**body, "max_tokens": 2})


def _spoilt_bytes(draw, path, body):
    text = json.dumps(body).encode()
    at = draw.randrange(len(text))
    depth = draw.choice([50, 900, 100_000])
    content = draw.choice(
        [
            text[:at],
            text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :],
            text[:at] + b"\xff\xfe" + text[at:],
            b"",
            draw.randbytes(200),
            b"[" * depth,
            b'{"a":' * depth,
            b'{"messages":' + b"[" * depth + b"]" * depth + b"}",
            b'{"n":' + b"9" * draw.choice([30, 5000]) + b"}",
            text[:-1] + b',"n":1,"n":2}',
            json.dumps(body).encode("utf-16"),
            b"\xef\xbb\xbf" + text,
            b"null",
            b'"text"',
        ]
    )
    return Sent("POST", path, content)


_ECHOED = {
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "x": [1]}}],
    "tool_choice": "none",
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {"maximum": 1, "x": {}}}},
    "metadata": {"a": "b"},
}
_RAW = ("1e999", "-1e999", "1e-999", "NaN", "-0", "9" * 400, '"\\u0000"', '"\\ud800"', "{}")


def _spoilt_place(draw, path, body):
    """What JSON can write and no field means, at any place, also of what an answer repeats."""
    if path == RESPONSES:
        body = {**body, **{name: _ECHOED[name] for name in draw.sample(sorted(_ECHOED), 2)}}
    body = json.loads(json.dumps(body))
    holder, key = draw.choice(list(places(body)))
    holder[key] = "@@"
    depth = draw.choice([10, 70, 99, 130, 950])
    raw = draw.choice([*_RAW, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth])
    return Sent("POST", path, json.dumps(body).replace('"@@"', raw).encode())


def _large(draw, path, body):
    big = draw.choice(
        [
            {"prompt": "word " * draw.choice([3000, 200_000])},
            {"prompt": [5] * 100_000},
            {"prompt": "a", "stop": ["x"] * 20_000},
            {"prompt": "a", "stop": "y" * 100_000},
            {"prompt": "a", "user": "x" * draw.choice([*[100_000] * 9, 9_000_000])},
            {"prompt": "a", "metadata": {str(index): index for index in range(20_000)}},
        ]
    )
    return _right(draw, COMPLETIONS, {**big, "max_tokens": 2})


def _spoilt_headers(draw, path, body):
    sent = _right(draw, path, body)
    spoilt = draw.choice(
        [
            {
                "Content-Type": draw.choice(
                    [
                        "text/plain",
                        "x",
                        "application/json2",
                    ]
                )
            },
            {"Content-Type": "Application/JSON; charset=utf-8"},
            {
                "Authorization": draw.choice(
                    ["", "Bearer", "Bearer wrong", "Basic c2VjcmV0", f"bearer {KEY}", "\xe9"]
                )
            },
            {"Content-Encoding": draw.choice(["gzip", "br", "identity"])},
            {"Range": "bytes=0-1", "Expect": "x"},
            {"Origin": "http://evil.example", "Host": "evil.example"},
        ]
    )
    headers = {**sent.headers, **spoilt}
    for name in draw.sample(sorted(headers), draw.randint(0, 1)):
        del headers[name]
    return replace(sent, headers=headers)


def _elsewhere(draw, path, body):
    paths = [
        "/",
        "/v1",
        "/v1/models",
        "/v1/models/tiny-fp8",
        "/v1/models/%ff",
        "/metrics",
        "/health",
        "/..%2f..%2fetc/passwd",
        "/%ff%00",
    ]
    method = draw.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST", "FROB"])
    return replace(
        _right(draw, path, body),
        method=method,
        path=draw.choice([*paths, path, path + "/", path + "?a=b"]),
    )


KINDS = (
    _right,
    _left,
    _spoilt_value,
    _spoilt_value,
    _spoilt_value,
    _spoilt_message,
    _missing,
    _spoilt_bytes,
    _spoilt_bytes,
    _spoilt_place,
    _spoilt_place,
    _large,
    _spoilt_headers,
    _elsewhere,
)
