"""Data sets of the hub, from the cache of the real `datasets` library and without a network.

    python tests/judges/datasets_cache.py

A data set is built here, and laid into the cache as a download from the hub leaves it. Exits with 1
where what quantkit reads is not that.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
os.environ |= {
    "HF_HOME": str(FOLDER),
    "HF_DATASETS_CACHE": str(FOLDER / "datasets"),
    "HF_HUB_OFFLINE": "1",
}

import datasets  # noqa: E402  (it reads the environment when it is imported)

from quantkit.calibrate.documents import read_records  # noqa: E402
from quantkit.common.errors import QuantkitError  # noqa: E402

ROWS = [
    {"instruction": f"say {number}", "input": "", "output": "word " * number}
    for number in range(30)
]


def lay_into_cache():
    """Open-Orca/OpenOrca, whose name the library writes in another way there."""
    source = FOLDER / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, ROWS)))
    built = Path(
        datasets.load_dataset("json", data_files=str(source), split="train").cache_files[0][
            "filename"
        ]
    ).parent
    target = FOLDER / "datasets" / "Open-Orca___open_orca" / "default" / "0.0.0" / ("a" * 40)
    shutil.copytree(built, target)
    for file in target.glob("json-*"):
        file.rename(target / file.name.replace("json-", "open_orca-"))
    about = json.loads((target / "dataset_info.json").read_text())
    (target / "dataset_info.json").write_text(
        json.dumps(about | {"dataset_name": "open_orca", "builder_name": "parquet"})
    )


def refusal(name):
    try:
        return f"read {len(list(read_records(name)))} records"
    except QuantkitError as error:
        return str(error)


def main():
    lay_into_cache()
    for name in (
        "Open-Orca/OpenOrca",
        "Open-Orca/OpenOrca:train",
        "Open-Orca/OpenOrca:default:train",
    ):
        assert [row for _, row in read_records(name)] == ROWS, name
    for name, said in (
        ("Open-Orca/OpenOrca:test", "Unknown split"),
        ("org/none", "is not in the cache, and this is offline"),
    ):
        assert said in refusal(name), refusal(name)
    shutil.rmtree(FOLDER)
    print(f"datasets {datasets.__version__}: 3 names read from the cache, 2 refused in one line")


if __name__ == "__main__":
    sys.exit(main())
