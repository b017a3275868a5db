"""Device nodes, character and block; one module for each way of finding them.

What they share: `options` (the keys), `finder` (what a way of finding does), `paths` (paths and globs, and who wants
them), `backend` (one face for all of them).
"""

from backends.chardev.backend import CharDev as CharDev
from backends.chardev.options import MOST_TOKENS as MOST_TOKENS
from backends.chardev.options import CharDevOptions as CharDevOptions
from backends.chardev.options import CharDevResource as CharDevResource
from backends.chardev.options import PathOption as PathOption
