"""What a power failure may leave of a folder: the state before each flush and each rename of a run,
in three forms. A kill leaves all that was written; a power failure may lose what was not flushed,
or leave zeros in its place, though names and sizes are there.
"""

import os
import random
from pathlib import Path


class Recorder:
    """images: of `root`, in order, without repetitions: contents by path, None for a folder."""

    def __init__(self, root, monkeypatch):
        self._root, self.images = root, []
        self._flushed = {}
        for name in ("fsync", "rename", "replace"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name, real):
        def call(*arguments, **named):
            self._cut()
            real(*arguments, **named)
            if name == "fsync":
                path = Path(f"/proc/self/fd/{arguments[0]}")
                if path.is_file():
                    self._flushed[path.stat().st_ino] = path.read_bytes()

        return call

    def _cut(self):
        whole = {}
        lost = {}
        zeros = {}
        seen = set()
        for path in sorted(self._root.rglob("*")):
            name = str(path.relative_to(self._root))
            if path.is_dir():
                whole[name] = lost[name] = zeros[name] = None
                continue
            content, inode = path.read_bytes(), path.stat().st_ino
            flushed = self._flushed.get(inode, b"")[: len(content)]
            seen.add(inode)
            whole[name], lost[name] = content, flushed
            zeros[name] = flushed + bytes(len(content) - len(flushed))
        self._flushed = {inode: data for inode, data in self._flushed.items() if inode in seen}
        self.images += [image for image in (whole, lost, zeros) if image not in self.images]

    def sample(self, count):
        """`count` images, or all, of a fixed seed."""
        chosen = range(len(self.images))
        if count < len(self.images):
            chosen = sorted(random.Random(20261129).sample(chosen, count))
        return [self.images[number] for number in chosen]


def restore(image, folder):
    """The folder as the power failure left it."""
    folder.mkdir(parents=True)
    for name, content in image.items():
        if content is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return folder
