"""Faults of the MTP layer: dropped, incomplete, not announced, not listed."""

from faulty.contents import Contents
from faulty.fault import fault, has_mtp, listed, lists_plain_modules, relist


@fault(
    "mtp-missing", suits=has_mtp, replays="llm-compressor 2735, Model-Optimizer 2141, ms-swift 7848"
)
def mtp_was_dropped(c: Contents) -> None:
    for name in c.mtp:
        del c.tensors[name]


@fault("mtp-missing", suits=has_mtp, source=True, replays="llm-compressor 2735")
def mtp_was_dropped_and_config_agrees(c: Contents) -> None:
    for name in c.mtp:
        del c.tensors[name]
    c.config["num_nextn_predict_layers"] = 0


@fault("mtp-incomplete", suits=has_mtp, replays="vllm 52111")
def mtp_lost_its_projection(c: Contents) -> None:
    for name in c.mtp:
        if "eh_proj" in name or "hnorm" in name:
            del c.tensors[name]


@fault("mtp-not-announced", suits=has_mtp, replays="sglang 34807")
def mtp_is_stored_and_not_announced(c: Contents) -> None:
    c.config["num_nextn_predict_layers"] = 0


@fault(
    "plain-not-listed",
    suits=lambda c: has_mtp(c) and lists_plain_modules(c) and bool(listed(c)),
    replays="vllm 37667, 52649, 44087",
)
def mtp_is_plain_and_not_listed(c: Contents) -> None:
    layer = f"layers.{c.config['num_hidden_layers']}"
    for module in [m for m in c.linears if f".{layer}." in m]:
        c.plain(module)
    # Entries of whole layers stand for this one alone here.
    relist(c, [entry for entry in listed(c) if layer not in entry.replace("\\", "")])
