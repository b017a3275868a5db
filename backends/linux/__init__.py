"""What several backends read of a Linux host, each thing in one place."""
