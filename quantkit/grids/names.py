"""The closed lists of names that schemes, engines' profiles and recipes use. Imports nothing heavy:
the command line reads them before any model does."""

from typing import Literal

GridName = Literal[
    "int4-asymmetric",
    "int4-symmetric",
    "int4-channel",
    "int4-w4a8",
    "int8",
    "int8-groups",
    "nvfp4",
    "nvfp4-w4a4",
    "mxfp4",
    "mxfp4-w4a4",
    "fp8",
    "mxfp8",
    "dense",
]
"""Grids as engines' profiles (recipes/engines) call them, whatever their group size."""

SchemeName = Literal[
    "awq-w4a16",
    "rtn-w4a16",
    "fp4-w4a16",
    "nvfp4-w4a4",
    "mxfp4-w4a16",
    "mxfp4-w4a4",
    "int8-a8w8c16",
    "int8-a8w8c8",
    "int4-w4a8",
    "int4-w4a8-groups",
    "w8a16",
    "fp8-w8a8",
    "fp8-block-w8a8",
    "mxfp8-w8a8",
]

WritableFormat = Literal["awq", "compressed-tensors", "modelopt", "modelslim", "gptq", "fp8-block"]
"""Formats that some scheme is written in."""

CacheCodes = Literal["int8", "fp8"]
Method = Literal["awq", "gptq", "smooth", "drift", "descent", "steps"]
