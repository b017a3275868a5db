"""Container Device Interface: hands a device's nodes and mounts to the container runtime by name, in specifications of ours."""
