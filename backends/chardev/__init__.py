"""Device nodes, character and block; one module for each way of finding them.

The ways: `nodes` (one path), `bundles` (several), `usb/single_sticks` (by vendor, product, serial), `usb/stick_sets`
(several sticks as one device), `whole_directories` (all nodes below a path), `matches` (by what udev says). What they
share: `options` and `selectors` (the keys), `groups` (a resource may be found in several ways), `finder` (what a way of
finding does), `paths` (paths and globs, and who wants them), `members` (nodes that the kernel names), `usb/sticks` (what
is handed out of a stick), `owners` (to whom a stick's nodes belong), `backend` (one face for all).
"""

from backends.chardev.backend import CharDev as CharDev
from backends.chardev.options import MOST_TOKENS as MOST_TOKENS
from backends.chardev.options import CharDevOptions as CharDevOptions
from backends.chardev.options import CharDevResource as CharDevResource
from backends.chardev.options import GroupOptions as GroupOptions
from backends.chardev.options import PathOption as PathOption
