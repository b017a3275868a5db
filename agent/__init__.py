"""The daemon: what a node has, told to the kubelet."""
