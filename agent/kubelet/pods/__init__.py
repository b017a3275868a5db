"""Which pods hold what, as the kubelet says."""
