"""Device nodes, character and block; one module for each way of finding them.

The ways: `nodes` (one path, or all nodes below a directory), `bundles` (several paths as one device), `usb_sticks` (by vendor,
product, serial; each, or several as one device), `udev_matches` (by what udev says). What they share: `options` (the keys) and
`finder` (what a way of finding does; groups of a resource, paths and globs, nodes that the kernel names). `backend` is one face
for all.
"""

from backends.chardev.backend import CharDev as CharDev
from backends.chardev.options import MOST_TOKENS as MOST_TOKENS
from backends.chardev.options import CharDevOptions as CharDevOptions
from backends.chardev.options import CharDevResource as CharDevResource
from backends.chardev.options import GroupOptions as GroupOptions
from backends.chardev.options import PathOption as PathOption
