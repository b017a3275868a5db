"""Dynamic resource allocation: the devices of resources with `serve = "dra"`, as Kubernetes' API server and the kubelet see them."""
