"""From backends to devices."""
