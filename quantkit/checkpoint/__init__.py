"""The only code that opens weight files.

header.py    the safetensors header, parsed strictly and written
reader.py    Checkpoint: everything checked from headers before the first byte of a weight is read
check.py     the tensors a format's quantized linears must have
layout.py    where every tensor of an output lies, decided before it is written
journal.py   what is already written and safe
writer.py    CheckpointWriter: units written in place, resumable after a kill at any moment
formats/     one file per on-disk format: pack and unpack
"""
