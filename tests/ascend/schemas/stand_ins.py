"""Make `import torch_npu` work without CANN: do-nothing libraries for the ones it links to, put
beside it.

Run with the Python of an environment that has torch_npu and gcc at hand. Afterwards the operators'
schemas and Meta functions are there; anything that would touch a device (is_available,
device_count) must not be called. Set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or importing torch imports
torch_npu too.
"""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import files
from pathlib import Path

LIBRARIES = (
    "libascendcl",
    "libhccl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
)
CANN_FUNCTION = re.compile(r"^(acl|rt[A-Z]|Msprof)\w+$")


def undefined(library):
    """The functions of CANN that a library expects from others."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    return {name for line in listing.splitlines() if CANN_FUNCTION.match(name := line.split()[-1])}


def main():
    libraries = [
        Path(str(file.locate())) for file in files("torch_npu") or [] if file.suffix == ".so"
    ]
    functions = sorted(set().union(*map(undefined, libraries)))
    target = next(path.parent for path in libraries if path.name == "libtorch_npu.so")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "functions.c"
        for name in LIBRARIES:
            source.write_text(
                "".join(f"int {function}(void) {{ return 0; }}\n" for function in functions)
                if name == "libascendcl"
                else ""
            )
            subprocess.run(
                ["gcc", "-shared", "-fPIC", "-o", target / f"{name}.so", source], check=True
            )
    sys.stdout.write(f"{len(functions)} functions of CANN have do-nothing stand-ins in {target}\n")


if __name__ == "__main__":
    main()
