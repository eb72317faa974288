"""How much of a model a job has in its scheme's grid, of what the format and the engine take."""

import math


def covered(job):
    """Share of the weights of linears that are on the scheme's grid, in groups of whatever size."""
    scheme, total, taken = job.request.scheme, 0, 0
    for row in job.rows:
        if row.role == "linear" and job.target.quantizes(row.module, row.role, mtp=row.mtp):
            total += math.prod(row.shape)
            own = scheme.grid(expert=row.expert is not None, mtp=row.mtp)
            grid = job.grids.get(row.module)
            taken += math.prod(row.shape) if grid is not None and grid.kind == own.kind else 0
    return taken / total if total else 1.0
