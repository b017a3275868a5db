"""Kubernetes' own faces: Events, a Node condition, and a Node annotation that drains; all of them off by default."""
