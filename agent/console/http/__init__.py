"""The HTTP face: metrics, probes, the status as JSON and as a live page. It reads, and changes nothing."""
