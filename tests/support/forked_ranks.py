"""Ranks as forks of the test's own process, which has imported everything: they meet over gloo
through a file."""

import gc
import os
import traceback

import torch
import torch.distributed as dist

from quantkit.executor.ranks.parallel import Parallel


def run_ranks(size, folder, compute):
    """What compute(parallel) returns on every rank, as torch saves it."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os._exit(_rank(rank, size, folder, compute))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * size, codes
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _rank(rank, size, folder, compute):
    # What an earlier test left, such as a group of gloo, is not taken apart here: it would wait for
    # threads that no fork has.
    gc.freeze()
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size
        )
        with torch.inference_mode():
            torch.save(compute(Parallel(rank, size)), folder / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
