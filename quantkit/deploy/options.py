"""Options of `quantkit deploy`."""

from dataclasses import dataclass

from quantkit.common.options import option


@dataclass(frozen=True)
class DeployOptions:
    """A layout by `boxes` and `devices`, or by its name."""

    boxes: int | None = option(
        None, "Machines that share the model; those of the layout by default, or one.", min=1
    )
    devices: str | None = option(
        None,
        "Devices of one machine: 4, 4x80GiB or 4xH100; those of the layout by default, mostly 8.",
    )
    layout: str | None = option(
        None, "A layout by name, such as one with separate prefill and decode."
    )
    context: int | None = option(
        None,
        "Tokens of the longest request; 16384 by default, or the model's limit if lower.",
        min=1,
    )
    hosts: str | None = option(None, "Addresses of the machines, comma-separated.")
    nic: str = option("eth0", "The network interface of these addresses.")
    format: str = option(
        "sh",
        "sh, compose, k8s, ray or slurm: what the launch is written for.",
        complete=lambda: ["sh", "compose", "k8s", "ray", "slurm"],
    )
    draft_length: int = option(
        0, "Draft tokens per step of the MTP layer; 0 does without.", min=0, old=("--mtp",)
    )
