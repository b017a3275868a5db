"""Container Device Interface: hands a device's nodes and mounts to the container runtime by name, in specifications of ours."""

from typing import Final

RECORD: Final = "cdi.json"
"""In `state_dir`: the resources that have a specification."""
