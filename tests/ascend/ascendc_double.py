"""A double of the Ascend C operators: the NumPy twins, registered for CPU tensors under the schemas
of binding.cpp.

`installed()` is a context: within it backend ascend finds them on a CPU, beside the doubles of
torch_npu and of the Triton kernels.
"""

import contextlib
import re

import torch
from ascend import ascendc, triton_double
from quantkit_kernels import backends
from quantkit_kernels.ascend import streamed


def schemas():
    """Of the operators, as the binding defines them."""
    return re.findall(r'library\.def\("([^"]+)"\)', (ascendc.SOURCES / "binding.cpp").read_text())


def int4_grouped(x, weight, parameters, group_list, cores):
    assert cores == streamed.cores(x.device)[0], (
        "a program for each cube core: more would wait for ever at SyncAll"
    )
    y = ascendc.twin("int4_grouped").multiply(
        x.float().numpy(), weight.numpy(), parameters.numpy(), group_list.numpy()
    )
    return torch.from_numpy(y).bfloat16()


def fp4_gemv(
    x,
    weight,
    scale,
    global_scale,
    group_list,
    splits,
    cores,
):
    assert cores == streamed.cores(x.device)[1], "a program for each vector core"
    words, bits = weight.view(torch.uint16).numpy(), scale.view(torch.uint8).numpy()
    y = ascendc.twin("fp4_gemv").gemv(
        x.float().numpy(), words, bits, global_scale.numpy(), group_list.numpy(), splits=splits
    )
    return torch.from_numpy(y).bfloat16()


@contextlib.contextmanager
def installed():
    """Yields the list to which each launch of a Triton kernel adds its name."""
    library = torch.library.Library("quantkit_ascendc", "DEF")
    for schema in schemas():
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, {"int4_grouped": int4_grouped, "fp4_gemv": fp4_gemv}[name], "CPU")
    backends.forget()
    try:
        with triton_double.installed() as launched:
            yield launched
    finally:
        library._destroy()
        backends.forget()
