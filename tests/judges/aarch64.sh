#!/bin/bash
# quantkit on an aarch64 processor, as qemu-user emulates it, next to this host: tests/judges/aarch64.sh DIR
# DIR gets a Debian root with torch's wheel and quantkit's own. There tiny-r1 is quantized as rtn-w4a16 and awq-w4a16, and asked: rtn's weights are
# those of here to the byte, and so is the answer; awq's, whose sums come in another order, are as near to the source. Then the tests of the
# processor's kernels. Speed is not seen. Wants to be root, debootstrap and qemu-user-static, and half an hour.
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
root=$(realpath -m "$1")
site=$root/usr/local/lib/python3.11/dist-packages
tests=(tests/kernels/test_cpu_{int8,few_rows}.py tests/kernels/test_linear.py)

if [ ! -e "$root/made" ]; then
  # Packages are unpacked and not configured, which would take longer and leave /proc and /sys mounted in DIR.
  rm -rf --one-file-system "$root"
  debootstrap --arch=arm64 --variant=minbase --foreign --include=python3,g++ bookworm "$root"
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  # torch 2.10, as in vllm-ascend's container: newer wheels for aarch64 ask for CUDA's libraries. pip reads markers as this host's, so no dependencies.
  platforms=(--platform=manylinux2014_aarch64 --platform=manylinux_2_{17,26,27,28,31}_aarch64)
  grep -vE '^(torch|mypy|ruff|librt|ast_serialize)==' constraints.txt > "$root/requirements.txt"
  "$python" -m pip install --quiet --no-deps --only-binary=:all: --python-version 3.11 --abi cp311 --abi abi3 --abi none \
    "${platforms[@]}" --target "$site" --requirement "$root/requirements.txt" torch==2.10.0
  touch "$root/made"
fi
if [ ! -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]; then  # where systemd does not
  mountpoint --quiet /proc/sys/fs/binfmt_misc || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
  cat /usr/lib/binfmt.d/qemu-aarch64.conf > /proc/sys/fs/binfmt_misc/register
fi

rm -rf --one-file-system "$root"/opt/{wheel,tests,out}
"$python" -m hatchling build --target wheel --directory "$root/opt/wheel"
"$python" -m zipfile -e "$root"/opt/wheel/*.whl "$site"
cp -r tests pyproject.toml "$root/opt"

# /proc and /sys are mounted for that process alone. Without SVE, as Kunpeng 920: of qemu's 2,048 bits torch's Cholesky is wrong.
there() {
  unshare --mount --propagation private sh -c 'mount -t proc proc "$0/proc"; mount -t sysfs -o ro sysfs "$0/sys"; exec chroot "$0" env -i USER=root \
    HOME=/root PATH=/usr/bin:/bin OMP_NUM_THREADS=1 QEMU_CPU=max,sve=off sh -c "cd /opt; exec python3 -m \"\$@\"" - "$@"' "$root" "$@"
}
here() { (cd "$root/opt" && OMP_NUM_THREADS=1 "$python" -m "$@"); }
python=$(realpath -s "$python")
ask=(--prompt "Maren plants 21 rows of 15 daisies and 9 rows of 48 daisies. The wind breaks 146 of them. How many daisies are left?")
for where in here there; do
  for scheme in rtn-w4a16 "awq-w4a16 --samples 4 --seq-len 64"; do
    out=out/$where-${scheme%% *}
    $where quantkit quantize tiny-r1 --scheme $scheme --device cpu --out "$out"
    $where quantkit run "$out" "${ask[@]}" --device cpu --json | tee "$root/opt/$out.json"
  done
done
cmp "$root"/opt/out/{here,there}-rtn-w4a16/model-00001-of-00001.safetensors
"$python" - "$root/opt/out" <<'END'
import json, pathlib, sys
read = lambda name: json.loads((pathlib.Path(sys.argv[1]) / name).read_text())
here, there = ((read(f"{where}-rtn-w4a16.json"), read(f"{where}-awq-w4a16/report.json")) for where in ("here", "there"))
assert here[0]["text"] == there[0]["text"]
assert 0.95 < there[1]["mean_error"] / here[1]["mean_error"] < 1.05
assert there[1]["held_out"]["kl"] < 2 * here[1]["held_out"]["kl"]
END
there pytest "${tests[@]}"
