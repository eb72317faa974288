"""A deployment as other programs read it: docker compose, Kubernetes, Ray Serve, Slurm.

Each takes from a launch its script, its devices, its API's port and the model's folder. Who starts
the boxes also chooses them, but for docker compose: addresses are then variables of the scripts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit.common.bind import host_in_url
from quantkit.common.errors import UsageError
from quantkit.common.result import JsonObject
from quantkit.deploy.launch import Deployment
from quantkit.deploy.script import API_KEY, Launch, quoted
from quantkit.engines.profiles import Device

_NPU_DEVICES = ("davinci_manager", "devmm_svm", "hisi_hdc")
_NPU_FILES = (
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
    "/usr/local/bin/npu-smi",
    "/usr/local/dcmi",
)
"""What a container needs of Ascend's driver, by vllm-ascend's installation page."""
_K8S_DEVICE: dict[Device, str] = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
_SLURM_DEVICES: dict[Device, str] = {"cuda": "--gpus-per-node={}", "npu": "--gres=npu:{}"}
_LOADING = 60
"""Minutes that a server has to load the model before its health counts."""
# Options that say where a rank of vLLM is, which Ray decides, and those that Serve has itself.
_PLACED_BY_RAY = re.compile(
    "host|port|served-model-name|nnodes|node-rank|master-.*|data-parallel-(size-local|address|rpc-port)"
)


@dataclass(frozen=True)
class Format:
    """write: the files of a launch, as text. scheduled: the boxes are chosen by the program that reads
    them. note: how they are used."""

    write: Callable[[Deployment], list[str]]
    scheduled: bool = False
    note: str = ""


def find_format(name: str, *, hosts: bool) -> Format:
    """hosts: whether the boxes' addresses are given. Raises UsageError for an unknown format."""
    if name not in FORMATS:
        raise UsageError(f"format {name!r} is not known", f"choose one of {', '.join(FORMATS)}")
    found = FORMATS[name]
    if found.scheduled and hosts:
        raise UsageError(f"--hosts does not go with --format {name}", "leave out --hosts")
    return found


def _scripts(made: Deployment) -> list[str]:
    return [launch.script() for launch in made.launches]


def _compose(made: Deployment) -> list[str]:
    _check_image(made)
    boxes = list(dict.fromkeys(launch.box for launch in made.launches))
    services: JsonObject = {}
    for number, launch in enumerate(made.launches):
        service: JsonObject = {
            "image": made.image,
            "entrypoint": ["bash", "-c"],
            "command": [_in_container(launch).replace("$", "$$")],
            "environment": [API_KEY] if launch.key else [],
            "network_mode": "host",
            "ipc": "host",
            "ulimits": {"memlock": -1},
            "volumes": [
                {"type": "bind", "source": path, "target": path, "read_only": True}
                for path in (*_folders(made), *(_NPU_FILES if made.device == "npu" else ()))
            ],
        }
        if len(boxes) > 1:
            service["profiles"] = [f"box{boxes.index(launch.box)}"]
        if launch.port is not None:
            url = f"http://{host_in_url(launch.host)}:{launch.port}/health"
            probe = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=5)"
            service["healthcheck"] = {
                "test": ["CMD", "python3", "-c", probe],
                "interval": "30s",
                "timeout": "10s",
                "start_period": f"{_LOADING}m",
            }
        if launch.role != "router":
            service |= _compose_devices(made)
        services[f"{launch.role}-{number}"] = service
    return [_yaml({"name": _label(made.name), "services": services})]


def _compose_devices(made: Deployment) -> JsonObject:
    if made.device == "npu":
        names = [*(f"davinci{number}" for number in range(made.devices_per_box)), *_NPU_DEVICES]
        return {"devices": [f"/dev/{name}:/dev/{name}" for name in names]}
    device = {"driver": "nvidia", "count": made.devices_per_box, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _k8s(made: Deployment) -> list[str]:
    """A Deployment of one pod for each box, with a headless Service by whose name other boxes and
    clients reach it."""
    _check_image(made)
    boxes = _boxes(made)
    names = {box: f"{_label(made.name)}-{number}" for number, box in enumerate(boxes)}
    volumes = [
        {"name": f"files-{number}", "hostPath": {"path": path}}
        for number, path in enumerate(_folders(made))
    ]
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    mounts = [
        *(
            {"name": f"files-{number}", "mountPath": path, "readOnly": True}
            for number, path in enumerate(_folders(made))
        ),
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    objects = []
    for box, launches in boxes.items():
        label, serves = {"app": names[box]}, any(launch.key for launch in launches)
        own = {"fieldRef": {"fieldPath": "status.podIP"}}
        secret = {"secretKeyRef": {"name": "quantkit-api-key", "key": "key"}}
        environment = [
            *([{"name": API_KEY, "valueFrom": secret}] if serves else []),
            *(
                {"name": other, "valueFrom": own}
                if other == box
                else {"name": other, "value": names[other]}
                for other in boxes
            ),
        ]
        containers = []
        for launch in launches:
            container: JsonObject = {
                "name": launch.role,
                "image": made.image,
                "command": ["bash", "-c", _in_container(launch)],
                "env": environment,
                "volumeMounts": mounts,
            }
            if launch.role != "router":
                devices = {_K8S_DEVICE[made.device]: str(made.devices_per_box)}
                container["resources"] = {"limits": devices}
            if launch.port is not None:
                probe = {"httpGet": {"path": "/health", "port": launch.port}, "timeoutSeconds": 10}
                container |= {
                    "ports": [{"containerPort": launch.port}],
                    "startupProbe": {
                        **probe,
                        "periodSeconds": 30,
                        "failureThreshold": 2 * _LOADING,
                    },
                    "livenessProbe": {**probe, "periodSeconds": 30},
                    "readinessProbe": probe,
                }
            containers.append(container)
        # Boxes meet before they are ready.
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": label}
        pod = {
            "metadata": {"labels": label},
            "spec": {"containers": containers, "volumes": volumes},
        }
        deployment = {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": label},
            "template": pod,
        }
        about = {"name": names[box], "labels": label}
        objects += [
            {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about, "spec": deployment},
        ]
    return ["---\n".join(map(_yaml, objects))]


def _ray(made: Deployment) -> list[str]:
    """A configuration of Ray Serve, whose own deployments of vLLM place the ranks."""
    if made.engine != "vllm":
        raise UsageError(f"Ray Serve starts vLLM, not {made.engine}", "give --format slurm")
    configs: dict[str, JsonObject] = {}
    for launch in made.launches:
        if launch.port is not None and launch.role not in ("router", *configs):
            ((_, words),) = launch.commands
            # The interfaces are those of the nodes, which Ray's workers find by themselves.
            configs[launch.role] = {
                "model_loading_config": {"model_id": made.name, "model_source": words[2]},
                "engine_kwargs": _keywords(words[3:]),
                "deployment_config": {"num_replicas": 1},
            }
    if set(configs) == {"prefill", "decode"}:
        builder = "build_pd_openai_app"
        arguments: JsonObject = {f"{role}_config": one for role, one in configs.items()}
    elif "data_parallel_size" in configs["server"]["engine_kwargs"]:
        builder, arguments = "build_dp_openai_app", {"llm_config": configs["server"]}
    else:
        builder, arguments = "build_openai_app", {"llm_configs": [configs["server"]]}
    application = {
        "name": _label(made.name),
        "import_path": f"ray.serve.llm:{builder}",
        "route_prefix": "/",
        "args": arguments,
    }
    listens = {"host": "127.0.0.1", "port": 8000}
    return [
        _yaml(
            {"proxy_location": "HeadOnly", "http_options": listens, "applications": [application]}
        )
    ]


def _keywords(options: Sequence[str]) -> JsonObject:
    """Options of vLLM's command line as its engine's arguments."""
    found: JsonObject = {}
    for name, value in zip(options, [*options[1:], "--"]):
        option = name.removeprefix("--")
        if option != name and not _PLACED_BY_RAY.fullmatch(option):
            given = True if value.startswith("--") else yaml.safe_load(value)
            found[option.replace("-", "_")] = given
    return found


def _slurm(made: Deployment) -> list[str]:
    boxes = list(_boxes(made))
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_label(made.name)}",
        f"#SBATCH --nodes={len(boxes)}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH {_SLURM_DEVICES[made.device].format(made.devices_per_box)}",
        "#SBATCH --exclusive",
        'boxes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
        "address() {",
        '    node=$(scontrol show node "$1" --oneliner)',
        "    node=${node#* NodeAddr=}",
        '    found=$(getent ahostsv4 "${node%% *}")',
        '    echo "${found%% *}"',
        "}",
        *(f'export {box}=$(address "${{boxes[{number}]}}")' for number, box in enumerate(boxes)),
    ]
    for number, launch in enumerate(made.launches):
        body = "".join(f"    {line}\n" for line in launch.body().splitlines())
        at = f'"${{boxes[{boxes.index(launch.box)}]}}"'
        lines += [
            f"launch_{number}() {{  # {launch.role}",
            f"{body}}}",
            f"export -f launch_{number}",
            f"srun --nodes=1 --ntasks=1 --overlap --nodelist={at} bash -c launch_{number} &",
        ]
    # Of those that wait for the one that ended none is left: a job's end ends its steps.
    return ["\n".join([*lines, "wait -n", ""])]


def _boxes(made: Deployment) -> dict[str, list[Launch]]:
    """The launches of each box."""
    found: dict[str, list[Launch]] = {}
    for launch in made.launches:
        found.setdefault(launch.box, []).append(launch)
    return found


def _check_image(made: Deployment) -> None:
    if not made.image:
        raise UsageError(
            f"no image of {made.engine} on {made.device} is known",
            "give --format sh or --format slurm",
        )


def _in_container(launch: Launch) -> str:
    installs = (
        f"python3 -m pip --quiet install {quoted(launch.package)}\n" if launch.package else ""
    )
    return installs + launch.body()


def _folders(made: Deployment) -> list[str]:
    """The model's, by its address in the commands; none if the engine downloads it."""
    path = Path(made.model)
    return [str(path.resolve())] if path.is_dir() else []


def _label(name: str) -> str:
    """As Kubernetes names objects and Slurm names jobs."""
    return f"quantkit-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')[:40] or 'model'}".rstrip(
        "-"
    )


class _Dumper(yaml.SafeDumper):
    """Writes scripts line by line, and what is said twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def _yaml(value: JsonObject) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000)


FORMATS = {
    "sh": Format(_scripts),
    "compose": Format(
        _compose,
        note="Save it as compose.yaml: docker compose up starts it; of several boxes the first starts "
        "its part with docker compose --profile box0 up, the second with box1.",
    ),
    "k8s": Format(
        _k8s,
        scheduled=True,
        note="kubectl apply -f - reads it. The model's folder must be on each node, and the key in "
        "a secret: kubectl create secret generic quantkit-api-key --from-literal=key=KEY.",
    ),
    "ray": Format(
        _ray,
        scheduled=True,
        note="serve deploy FILE starts it on a running Ray cluster, whose nodes need vLLM and the "
        "model's folder. Ray Serve checks no API key: it listens on the head's loopback alone.",
    ),
    "slurm": Format(
        _slurm,
        scheduled=True,
        note="sbatch reads it. The engine and the model's folder must be on each node. When one box "
        "has ended, the job ends.",
    ),
}
