"""MXFP4 as gpt-oss is published: E2M1 codes two to a byte along the inputs, the even one in the low
bits, a power of two per 32. Read only.

X.blocks uint8 [N, K / 2]   X.scales uint8 [N, K / 32], the exponent plus 127

On the disk the experts of a layer are stacked, with blocks [E, N, K / 32, 16]; published_stacks.py
takes them apart. All but experts is plain.
"""

from fnmatch import fnmatchcase

from quantkit.checkpoint.formats.base import Ignored, Json
from quantkit.checkpoint.formats.compressed_mxfp4 import Mxfp4Pairs
from quantkit.grids.base import Grid
from quantkit.grids.mxfp4 import Mxfp4Grid


class Mxfp4(Mxfp4Pairs):
    name = "mxfp4"
    variant = "blocks"
    marker = ".blocks"
    own_suffixes = (".blocks", ".scales")
    is_source = True

    def detect(self, config: Json, side: Json) -> bool:
        return (config.get("quantization_config") or {}).get("quant_method") == self.name

    def grid(self, config: Json, side: Json) -> Grid | None:
        return Mxfp4Grid()

    def ignored(self, config: Json, side: Json) -> Ignored:
        """Names or patterns of modules, or of what they are part of."""
        listed = config["quantization_config"].get("modules_to_not_convert") or []
        entries = [entry for entry in listed if isinstance(entry, str)]
        return lambda module: any(
            fnmatchcase(module, entry) or fnmatchcase(module, f"{entry}.*") for entry in entries
        )


FORMAT = Mxfp4()
