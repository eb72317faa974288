"""Shared basics without domain knowledge: errors, sizes, devices, atomic writes, safe reading of
model files, settings, progress, plots, results, sockets, shipped data files."""
