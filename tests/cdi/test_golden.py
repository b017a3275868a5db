"""The specifications of three backends, word for word as a runtime reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.cdi import spec
from agent.cdi.specifications import named
from backends.base import Backend, ContainerEdits, Device, Grant, Resource
from tests.backends.chardev.chardevs import chardev, configured
from tests.backends.gpu.gpus import backend, devices, resource
from tests.backends.machines import hgx_h100, uuid
from tests.backends.sriov.sriov_trees import E810, small, vfio_function
from tests.backends.sriov.test_backend import backend as sriov
from tests.backends.sriov.test_backend import resource as of_sriov
from tests.cdi.runtime import checked
from tests.cdi.test_specifications import by

GPU0 = uuid(0)


def written(
    found: Backend[Any], wanted: Resource[Any], every: Mapping[str, Device]
) -> tuple[ContainerEdits, dict[str, Any]]:
    """What a container with these devices is told, and the specification."""
    grants = [Grant(one, device) for one, device in every.items()]
    told = named(found, wanted, grants, found.edits(wanted, grants))
    assert told is not None
    return told.edits, checked(
        spec.encode(spec.kind(wanted.name), {name: spec.edits(it) for name, it in told.devices.items()})
    )


def test_a_gpu_with_the_names_of_nvidias_own_beside_ours(tmp_path: Path) -> None:
    wanted = by("cdi", resource(device_list_strategy=["envvar", "cdi-cri", "cdi-annotations"], pass_device_specs=True))
    found = backend(tmp_path, hgx_h100(), wanted)
    told, said = written(found, wanted, {GPU0: devices(found)[GPU0]})
    assert told.cdi_devices == (f"k8s.device-plugin.nvidia.com/gpu={GPU0}", f"fairlead.nvidia.com/gpu={GPU0}")
    assert sorted(told.annotations.values()) == sorted(told.cdi_devices)
    assert told.env == {"NVIDIA_VISIBLE_DEVICES": GPU0}
    paths = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset", "/dev/nvidia0"]
    assert said == {
        "cdiVersion": "0.3.0",
        "kind": "fairlead.nvidia.com/gpu",
        "containerEdits": {},
        "devices": [
            {
                "name": GPU0,
                "containerEdits": {"deviceNodes": [{"path": path, "permissions": "rw"} for path in paths]},
            }
        ],
    }


def test_virtual_functions_on_vfio_whose_addresses_take_version_0_5(tmp_path: Path) -> None:
    tree = small(E810, 2).tree(bare=[0, 1]) + "dev/vfio/vfio c 10:196\n"
    tree += vfio_function(E810, 0, 70, noiommu=True) + vfio_function(E810, 1, 71, noiommu=True)
    wanted = by("cdi", of_sriov())
    found = sriov(tmp_path, tree, wanted)
    every = {it.key: it for unit in found.units() for it in found.discover(unit).devices}
    told, said = written(found, wanted, every)
    assert (len(told.env), told.nodes) == (2, ())
    assert said == {
        "cdiVersion": "0.5.0",
        "kind": "fairlead.intel.com/sriov__net",
        "containerEdits": {},
        "devices": [
            {
                "name": E810.vf(n),
                "containerEdits": {
                    "deviceNodes": [
                        {"path": "/dev/vfio/vfio", "permissions": "rw"},
                        {"path": f"/dev/vfio/{70 + n}", "permissions": "rw", "hostPath": f"/dev/vfio/noiommu-{70 + n}"},
                    ]
                },
            }
            for n in (0, 1)
        ],
    }


def test_a_bundle_with_its_mount(tmp_path: Path) -> None:
    conf = {"path": "/etc/scanner.conf", "type": "mount", "mount_path": "/etc/", "read_only": True}
    paths = [{"path": "/dev/ttyUSB0", "permissions": "rw"}, conf]
    wanted = by("cdi", configured("example.com/scanner.x", paths=paths))
    found = chardev(tmp_path, "dev/ttyUSB0 c 188:0\netc/scanner.conf = x", wanted)
    every = {found.ids(wanted, it)[0]: it for unit in found.units() for it in found.discover(unit).devices}
    _, said = written(found, wanted, every)
    mount = {
        "hostPath": "/etc/scanner.conf",
        "containerPath": "/etc/scanner.conf",
        "options": ["rbind", "rprivate", "ro"],
    }
    assert said == {
        "cdiVersion": "0.3.0",
        "kind": "fairlead.example.com/scanner_2e_x",
        "containerEdits": {},
        "devices": [
            {
                "name": "ttyUSB0",
                "containerEdits": {
                    "deviceNodes": [{"path": "/dev/ttyUSB0", "permissions": "rw"}],
                    "mounts": [mount],
                },
            }
        ],
    }
