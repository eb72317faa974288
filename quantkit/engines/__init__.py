"""Other people's engines: what each loads, and how it is launched.

profiles   what an engine loads, as values read from recipes/engines/*.yaml
choice     the format and grid to write so that an engine loads a scheme
check      what keeps an engine from loading a checkpoint
memory     what one device holds of a checkpoint, and how many tokens fit beside it
launch     the commands of a deployment, box by box
"""
