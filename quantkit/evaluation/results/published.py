"""Results published by others (eval/reference), as data with their source. Shown next to ours
under their own heading, never merged."""

import re
from functools import cache

from quantkit.common.assets import asset
from quantkit.common.result import JsonObject
from quantkit.common.settings import Strict, read_yaml


class PublishedEntry(Strict):
    """Scores in percent by task name."""

    model: str
    scheme: str
    scores: dict[str, float]


class AccuracyTable(Strict):
    """`wording`: task name -> the name that the source uses."""

    source: str
    hardware: str
    harness: str
    remark: str
    entries: list[PublishedEntry]
    wording: dict[str, str]


class SpeedTable(Strict):
    """`rows` under `columns`; None where the source gives no value."""

    name: str
    source: str
    model: str
    scheme: str
    hardware: str
    settings: str
    remark: str
    output_len: int | None
    columns: list[str]
    rows: list[list[float | None]]


@cache
def accuracy_tables() -> tuple[AccuracyTable, ...]:
    return read_yaml(
        asset("eval", "reference", "accuracy.yaml"), tuple[AccuracyTable, ...], "restore that file"
    )


@cache
def speed_tables() -> tuple[SpeedTable, ...]:
    return read_yaml(
        asset("eval", "reference", "speed.yaml"), tuple[SpeedTable, ...], "restore that file"
    )


def published_speeds() -> list[JsonObject]:
    """The speed tables, all of Ascend machines, as JSON: metadata and rows as records without
    the values not given."""
    return [
        table.model_dump(exclude={"columns", "rows"})
        | {
            "rows": [
                {name: value for name, value in zip(table.columns, row) if value is not None}
                for row in table.rows
            ]
        }
        for table in speed_tables()
    ]


def published_speeds_for(model: str) -> list[JsonObject]:
    """Those of `published_speeds` for this model, by the name of its folder or of a server's
    model. Other releases and distilled models do not match; quantization suffixes are
    ignored."""
    return [table for table in published_speeds() if _matches(model, table["model"])]


_QUANTIZATION_SUFFIX = re.compile(
    r"(w\d+)?(a\d+)?(c\d+)?|awq|gptq|rtn|int\d|(nv|mx)?fp\d+|bf16|modelopt|compressed|tensors|modelslim|go"
)


def _matches(name: str, published: str) -> bool:
    words, wanted = (re.split(r"[-_/. ]+", text.lower()) for text in (name, published))
    place = next((at for at in range(len(words)) if words[at : at + len(wanted)] == wanted), None)
    return place is not None and all(
        _QUANTIZATION_SUFFIX.fullmatch(word) for word in words[place + len(wanted) :]
    )


def published_scores(task: str) -> list[JsonObject]:
    """Every published score of a task in percent, in file order, with its model, scheme, source,
    hardware, harness, remark, and the source's name of the task (`called`)."""
    return [
        table.model_dump(exclude={"entries", "wording"})
        | {
            "score": entry.scores[task],
            "model": entry.model,
            "scheme": entry.scheme,
            "called": table.wording.get(task, task),
        }
        for table in accuracy_tables()
        for entry in table.entries
        if task in entry.scores
    ]
