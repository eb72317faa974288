"""Inference engines: what each loads, the format to write for it, whether a checkpoint loads and
fits, and the layouts it is launched in."""
