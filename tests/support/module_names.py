"""What a checkpoint's linears are called."""


def module_names(checkpoint):
    """Modules that hold a 2-D weight, quantized or not, in the order of `tensors`."""
    tensors = checkpoint.tensors.values()
    plain = (
        t.name.removesuffix(".weight")
        for t in tensors
        if t.name.endswith(".weight") and len(t.shape) == 2
    )
    return list(dict.fromkeys([*checkpoint.linears, *plain]))
