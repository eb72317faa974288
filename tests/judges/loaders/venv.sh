#!/bin/bash
# Makes an environment with an engine's loader, for Python 3.11: tests/judges/loaders/venv.sh vllm-ascend|sglang DIR SITE
# SITE: site-packages with torch and quantkit, seen from it. Of the engines' wheels only Python is taken, for their kernels are built for
# devices; their requirements that come with CUDA or CANN are left out, and `absent.py` stands for those that are imported all the same.
set -euo pipefail
engine=$1 environment=$2 site=$3
python3 -m venv "$environment"
own=$("$environment/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
echo "import site; site.addsitedir('$site')" > "$own/beside.pth"
pip=("$environment/bin/pip" --quiet --disable-pip-version-check)
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
both=(aiohttp blobfile einops gguf numba partial-json-parser prometheus_client pybase64 pyzmq msgspec scipy setproctitle tiktoken watchfiles)
if [ "$engine" = vllm-ascend ]; then
    "${pip[@]}" download --no-deps --dest "$wheels" vllm==0.23.0 vllm-ascend==0.23.0
    "${pip[@]}" install torch==2.13.0 transformers==5.5.4 compressed-tensors==0.17.0 'fastapi[standard]<0.124' 'llguidance<1.8' \
        outlines_core==0.2.14 lm-format-enforcer==0.11.3 depyf==0.20.0 diskcache==5.6.3 lark==1.2.2 'xgrammar<1' \
        'mistral_common[image]>=1.11.3' 'model-hosting-container-standards<1' anthropic blake3 cachetools cbor2 cloudpickle ijson mcp \
        msgpack ninja openai-harmony opentelemetry-sdk pandas prometheus-fastapi-instrumentator protobuf py-cpuinfo python-json-logger \
        quart "${both[@]}"
    "${pip[@]}" install --no-deps torch_npu==2.13.0
    "$environment/bin/python" "$(dirname "$0")/../../ascend/schemas/stand_ins.py"
else
    "${pip[@]}" download --no-deps --dest "$wheels" sglang==0.5.23
    "${pip[@]}" install torch==2.13.0 transformers==5.19.0 IPython interegular llguidance openai==2.8.0 orjson python-multipart uvicorn \
        uvloop fastapi xxhash zstandard sentencepiece "${both[@]}"
    "${pip[@]}" install --no-deps compressed-tensors==0.18.0 triton xgrammar==0.2.7 apache-tvm-ffi==0.1.11 openai-harmony==0.0.4 \
        outlines==0.1.11 timm==1.0.25 dill datasets multiprocess anthropic docstring-parser distro easydict
fi
"$environment/bin/python" - "$own" "$wheels"/*.whl <<'PYTHON'
import sys
import zipfile

for wheel in map(zipfile.ZipFile, sys.argv[2:]):
    kept = [name for name in wheel.namelist() if not name.endswith(".so") and "/_cann_ops_custom/" not in name]
    wheel.extractall(sys.argv[1], kept)
PYTHON
