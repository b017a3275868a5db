"""From backends and kernel events to the devices that are there."""
