"""The commands, one file each; a command imports what it needs only when it runs."""
