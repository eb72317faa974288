"""Print the schemas of the operators that backend torch_npu calls, as torch_npu itself registers
them: the lines of tests/ascend/npu_schemas.txt."""

import sys

import torch
import torch_npu  # noqa: F401
from quantkit_kernels.torch_npu.rules import RULES

if __name__ == "__main__":
    sys.stdout.writelines(f"{getattr(torch.ops.npu, name).default._schema}\n" for name in RULES)
