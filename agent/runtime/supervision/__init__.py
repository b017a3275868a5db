"""Watches over the daemon's own parts: starts them again, reports what fails, feeds systemd's watchdog."""
