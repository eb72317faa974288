"""The files of a quantized checkpoint, to be compared with those of another run; and shards moved
to a folder below."""

import json
import re

REPORTS = ("report.json", "report.html")


def files(directory):
    """Contents by name, but for what reports say of the run itself, when, where and for how long,
    and where source and output were."""
    found = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
    card = found.pop("README.md", b"")  # its command has the names of the folders
    if card:
        assert b"quantkit serve" in card
        manifest = json.loads(found["manifest.json"])
        del manifest["files"]["README.md"]
        found["manifest.json"] = json.dumps(manifest).encode()
    if REPORTS[0] in found:
        facts = json.loads(found[REPORTS[0]])
        assert facts["run"]["seconds"] >= 0
        del facts["run"], facts["source"], facts["command"]
        page, rows = re.subn(
            rb"<tr><th>(source|command|machine|finished)</th>.*?</tr>", b"", found[REPORTS[1]]
        )
        assert rows == 4
        manifest = json.loads(found["manifest.json"])
        for name in REPORTS:
            del manifest["files"][name]
        found |= {
            REPORTS[0]: json.dumps(facts).encode(),
            REPORTS[1]: page,
            "manifest.json": json.dumps(manifest).encode(),
        }
    return found


def shards_below(model):
    """The same model with its shards in the folder `weights` below, where its index names them.
    Returns `model`."""
    index = model / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    (model / "weights").mkdir()
    for shard in set(told["weight_map"].values()):
        (model / shard).rename(model / "weights" / shard)
    index.write_text(
        json.dumps(
            {"weight_map": {name: f"weights/{shard}" for name, shard in told["weight_map"].items()}}
        )
    )
    return model
